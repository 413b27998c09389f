"""Files of a Hugging Face dataset at a pinned commit, through the hub's own client (cache, login, retries)."""

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.settings.data import SourceSettings


def resolve(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {path in the repository: local file name}, which are equal. Patterns are matched in the repository.

    Without a network, patterns are matched against `recorded`, the files of an earlier download of this corpus.
    Raises UserError for a pattern without a match, or if the files cannot be listed.
    """
    if not any(_is_pattern(name) for name in files):
        return {name: name for name in files}
    from huggingface_hub import HfApi

    try:
        repository_files = HfApi().list_repo_files(source.repository, repo_type="dataset", revision=source.revision)
    except Exception as error:  # the client's errors have no common base but Exception
        if not recorded:
            raise _download_error(source, ", ".join(files), error) from None
        print(f"{source.repository}: no list from the hub; taking the files of the earlier download", flush=True)
        repository_files = recorded
    found: dict[str, str] = {}
    for pattern in files:
        matches = sorted(name for name in repository_files if name == pattern or fnmatch(name, pattern))
        if not matches:
            near = find_nearest(pattern, repository_files)
            raise UserError(
                "no file of the dataset fits a source's pattern.",
                dataset=f"{source.repository} at {source.revision}",
                requested=pattern,
                has=", ".join(sorted(repository_files)[:8]) + (", …" if len(repository_files) > 8 else ""),
                next=f"did you mean {near!r}?" if near else "correct `files` of the source",
            )
        found |= {name: name for name in matches}
    return found


def fetch(source: SourceSettings, name: str, target: Path, *, resumable: bool = True) -> None:
    """Link one file to `target` from the hub's cache, after downloading it if needed.

    The client honours HF_HOME and HF_HUB_OFFLINE. The file is copied if the cache is on another file system. Raises
    UserError with the client's own reason.
    """
    from huggingface_hub import hf_hub_download

    try:
        cached = hf_hub_download(source.repository, name, repo_type="dataset", revision=source.revision)
    except Exception as error:  # as in `resolve`
        raise _download_error(source, name, error) from None
    blob = Path(cached).resolve()
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        os.link(blob, part)
    except OSError:
        shutil.copyfile(blob, part)
    part.replace(target)


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def _download_error(source: SourceSettings, name: str, error: Exception) -> UserError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return UserError(
        "the hub does not give a file of the dataset.",
        dataset=f"{source.repository} at {source.revision}",
        file=name,
        reason=f"{type(error).__name__}: {lines[0][:200]}",
        next="unset HF_HUB_OFFLINE where there is a network, or bring the hub's cache here (HF_HOME)"
        if offline
        else "check names, revision, network and, for gated data, `hf auth login`",
    )
