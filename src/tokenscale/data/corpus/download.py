"""Download of a remote source to `results/downloads/<corpus>/`: files checked by hash, and a manifest.

Files come from web addresses, from a bucket (`s3://…`) through fsspec, or from a Hugging Face dataset at a pinned
commit through the hub's own client (cache, login, retries). The configuration declares a hash after `#sha256=`. Without
one, the first download records the hash in `hashes.json` and later downloads must match it. The manifest is written
last, so it lists complete files only.
"""

import os
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from glob import has_magic
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import requests
import urllib3

from tokenscale.base.bucket import access_error, open_system
from tokenscale.base.errors import UserError, find_nearest, redact_credentials
from tokenscale.base.files import lock_folder, read_json, sha256_file, sync, write_json
from tokenscale.base.progress import Progress
from tokenscale.settings.data import FILE_LISTS, CorpusSettings, SourceSettings

VERSION = 1
RECORD, MANIFEST = "hashes.json", "manifest.json"


class Downloader(NamedTuple):
    """Functions of a kind of source: `resolve(source, files, recorded)` returns {remote name: local name}, where
    `recorded` are the files of an earlier download, and `fetch(source, name, target, resumable)` gets one file.
    """

    resolve: Callable[[SourceSettings, tuple[str, ...], list[str]], dict[str, str]]
    fetch: Callable[..., None]


def fetch_corpus(settings: CorpusSettings, directory: Path) -> dict[str, Any]:
    """Download the files of a corpus source into `directory` and return the manifest.

    Existing files with the right hash are kept. Raises UserError if a file cannot be downloaded or its hash differs
    from the declared or recorded one. A file with a wrong hash is deleted.
    """
    directory = Path(directory)
    source = settings.source
    if source.kind not in DOWNLOADS:
        raise UserError(
            "this corpus' source needs no download.",
            key="source.kind",
            found=source.kind,
            expected=", ".join(DOWNLOADS),
            next="python -m tokenscale corpus --help makes the corpus",
        )
    downloader = DOWNLOADS[source.kind]
    with lock_folder(directory, f"the download of {settings.name}"):
        record_path = directory / RECORD
        record: dict[str, str] = read_json(record_path, "record of hashes") if record_path.exists() else {}
        parts: dict[str, list[dict[str, Any]]] = {}
        used_names = {RECORD, MANIFEST}
        for key in FILE_LISTS:
            declared = dict(_split_hash(name) for name in getattr(source, key))
            listed = []
            for name, local in downloader.resolve(source, tuple(declared), list(record)).items():
                if local in used_names:  # two lists have a file of the same name
                    local = f"{key}-{local}"
                used_names.add(_check_local_name(local, name))
                target = directory / local
                sha256 = _download_file(downloader, source, name, target, declared.get(name), record)
                record[name] = sha256
                write_json(record_path, record)
                listed.append({"name": local, "from": name, "bytes": target.stat().st_size, "sha256": sha256})
            parts[key] = listed
        manifest = {
            "schema_version": VERSION,
            "kind": source.kind,
            **({"repository": source.repository, "revision": source.revision} if source.kind == "hub" else {}),
            **{key: listed for key, listed in parts.items() if listed},
        }
        write_json(directory / MANIFEST, manifest)
    return manifest


def _check_local_name(local: str, name: str) -> str:
    """Return the local file name. Raises UserError if it would leave the download folder: names may be untrusted."""
    parts = local.split("/")
    if "\0" in local or any(part in ("", ".", "..") for part in parts):
        raise UserError(
            "a file of the source would be written outside of its folder.",
            file=repr(name),
            found=repr(local),
            expected="a path without `..`, from the folder of the download on",
            next="name the file by another path, or choose another source",
        )
    return local


def _split_hash(name: str) -> tuple[str, str | None]:
    bare, _, sha256 = name.partition("#sha256=")
    return bare, sha256 or None


def _download_file(
    downloader: Downloader,
    source: SourceSettings,
    name: str,
    target: Path,
    declared: str | None,
    record: dict[str, str],
) -> str:
    """Download the file to `target` unless it is there, and return its hash. Raises UserError for a wrong hash."""
    expected = declared or record.get(name)
    if expected and target.is_file() and sha256_file(target) == expected:
        print(f"{target.name}: already here", flush=True)
        return expected
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".arriving")
    downloader.fetch(source, name, partial, resumable=expected is not None)
    digest = sha256_file(partial)
    if expected and digest != expected:
        size = partial.stat().st_size
        partial.unlink()
        raise UserError(
            "a downloaded file is not the one that was " + ("declared." if declared else "downloaded first."),
            file=name,
            expected=f"sha256 {expected}  ({'config' if declared else target.parent / RECORD})",
            found=f"sha256 {digest}  ({size:,} bytes, not kept)",
            next="check the declared hash and the address"
            if declared
            else f"the source has changed; to accept it, remove its line from {target.parent / RECORD}",
        )
    sync(partial)
    partial.replace(target)
    sync(target.parent)
    print(f"{target.name}: {target.stat().st_size:,} bytes, sha256 {digest}", flush=True)
    return digest


TRIES = 6
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
CHUNK_BYTES = 1 << 20
BUCKET_CHUNK_BYTES = 1 << 22
#: permanent errors, such as redirects to `file:` and `ftp:`
NO_SUCH_ADDRESS = (
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
    requests.exceptions.TooManyRedirects,
)
#: maximum length of a local file name; with prefix and suffix it fits the file system's limit of 255
LONGEST_NAME_BYTES = 200
#: an attempt that received this much resets the count of failures
PROGRESS_BYTES = 1 << 20
#: status codes to retry: the server or a proxy is busy
BUSY = {408, 425, 429, 500, 502, 503, 504}


def resolve_urls(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {URL: local file name}: the last part of the URL path, numbered if two are equal.

    URLs are untrusted: `%2F` in the last part creates no folder, and leading dots are removed.

    >>> resolve_urls(SourceSettings(), ("https://h/a/b.txt", "https://h/..%2F..%2Fetc"), [])
    {'https://h/a/b.txt': 'b.txt', 'https://h/..%2F..%2Fetc': 'etc'}
    """
    names = [_local_name(address) for address in files]
    if len(set(names)) < len(names):
        names = [f"{number:05d}-{name}" for number, name in enumerate(names)]
    return dict(zip(files, names, strict=True))


def _local_name(address: str) -> str:
    name = re.split(r"[/\\]", unquote(urlsplit(address).path.rsplit("/", 1)[-1]))[-1]
    name = "".join(c for c in name if c.isprintable()).encode("utf-8")[-LONGEST_NAME_BYTES:].decode("utf-8", "ignore")
    return name.lstrip(".") or "file"


def fetch_url(source: SourceSettings, address: str, target: Path, *, resumable: bool = True) -> None:
    """Download a URL to `target`. A partial download is kept beside it and resumed, also by a later call.

    A partial download is resumed only if the server confirms that the content is unchanged (ETag or Last-Modified,
    RFC 9110, 13.1.5) or if `resumable`, when the caller checks a hash. Raises UserError if the server refuses, after
    TRIES attempts in a row without progress, and for a web page in place of a file.
    """
    part = target.with_name(target.name + ".part")
    record = target.with_name(target.name + ".part.json")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _resume_download(address, part, record, resumable)
            break
        except _Retry as retry:
            reason, pause = retry.reason, retry.pause_s
        except NO_SUCH_ADDRESS as error:
            raise UserError(
                "a download leads to something that is not a web address.",
                address=address,
                reason=_first_line(error),
                expected="http:// or https://, also where a server sends it on to",
                next="use the address of the file itself",
            ) from None
        except requests.RequestException as error:
            reason, pause = _first_line(error), None
        after = part.stat().st_size if part.exists() else 0
        failures = 1 if after - before >= PROGRESS_BYTES else failures + 1
        if failures >= TRIES:
            raise UserError(
                "a download fails again and again.",
                address=address,
                tried=f"{failures} times in a row",
                reason=reason,
                kept=f"{after:,} bytes in {part}" if after else None,
                next="check the network and the address; the same command goes on where this one ended",
            )
        print(f"{redact_credentials(address)}: {reason}; trying again ({failures} of {TRIES - 1})", flush=True)
        sleep(pause if pause is not None else min(60.0, 2.0 ** (failures - 1)))
    part.replace(target)
    record.unlink(missing_ok=True)


class _Retry(Exception):
    """Temporary failure of one attempt."""

    def __init__(self, reason: str, pause_s: float | None = None):
        super().__init__(reason)
        self.reason, self.pause_s = reason, pause_s


def _resume_download(address: str, part: Path, record: Path, resumable: bool) -> None:
    """Request the missing bytes once and append them. Raises _Retry if the file is still incomplete."""
    received = part.stat().st_size if part.exists() else 0
    validator = read_json(record, "record of a begun download").get("validator") if record.exists() else None
    if received and not (validator or resumable):
        received = 0
    headers = {"Accept-Encoding": "identity"}
    if received:
        headers["Range"] = f"bytes={received}-"
        if validator:
            headers["If-Range"] = validator
    with requests.get(address, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if response.status_code in BUSY:
            retry_after = response.headers.get("Retry-After", "")
            raise _Retry(
                f"the server answers {response.status_code}",
                min(60.0, float(retry_after)) if retry_after.isdigit() else None,
            )
        if response.status_code == 416:  # the partial file is longer than the server's file
            part.unlink(missing_ok=True)
            record.unlink(missing_ok=True)
            raise _Retry("the partial file is longer than the server's; starting over", 0.0)
        if not response.ok:
            raise UserError(
                "a server does not give a file.",
                address=address,
                answer=f"{response.status_code} {response.reason}",
                next="check the address, and whether it needs a login",
            )
        page = "html" in response.headers.get("Content-Type", "")
        if page and not urlsplit(address).path.endswith((".html", ".htm")):
            raise UserError(
                "an address gives a web page, not a file.",
                address=address,
                found=response.headers["Content-Type"],
                next="use the address of the file itself (often called `raw` or `resolve`)",
            )
        continued = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {received}-"
        )
        if received and not continued:
            received = 0
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdigit() else None
        write_json(record, {"address": address, "validator": _get_validator(response.headers)})
        progress = Progress(urlsplit(address).path.rsplit("/", 1)[-1], total_bytes=total)
        with part.open("ab" if received else "wb") as file:
            reason = "ended"
            try:
                # not `iter_content`, which drops the last bytes before a broken connection
                while piece := response.raw.read1(CHUNK_BYTES):
                    file.write(piece)
                    progress(0, len(piece))
            except urllib3.exceptions.HTTPError as error:
                reason = "timed out" if isinstance(error, urllib3.exceptions.TimeoutError) else "broke"
        progress.close()
    size = part.stat().st_size
    if size != total if total is not None else reason != "ended":
        raise _Retry(f"the connection {reason} after {size:,} of {total or 0:,} bytes")


def _get_validator(headers: requests.structures.CaseInsensitiveDict) -> str | None:
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def _first_line(error: Exception) -> str:
    return redact_credentials((str(error).splitlines() or [type(error).__name__])[0][:200])


def resolve_objects(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {address: local path}, the path within the bucket. Patterns are matched in the bucket.

    If the bucket cannot be listed, patterns are matched against `recorded`, the files of an earlier download of this
    corpus. Raises UserError for a pattern without a match, or if the bucket cannot be listed.
    """
    found: dict[str, str] = {}
    for pattern in files:
        matches = [pattern] if not has_magic(pattern) else _list_matches(pattern, recorded)
        found |= {address: address.split("://", 1)[1].partition("/")[2] for address in matches}
    if len(set(found.values())) < len(found):  # of several buckets
        return {address: address.split("://", 1)[1] for address in found}
    return found


def _list_matches(pattern: str, recorded: list[str]) -> list[str]:
    scheme, path = pattern.split("://", 1)
    system = open_system(pattern, "s3")
    try:
        matches = sorted(f"{scheme}://{name}" for name in system.glob(path))
    except Exception as error:  # errors of the clients have no common base but Exception
        matches = sorted(name for name in recorded if fnmatch(name, pattern))
        if not matches:
            raise access_error(pattern, error) from None
        print(f"{pattern}: the bucket cannot be listed; taking the files of the earlier download", flush=True)
    if not matches:
        folder = path.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0]
        try:
            there = [f"{scheme}://{name}" for name in system.ls(folder, detail=False)]
        except Exception as error:
            raise access_error(pattern, error) from None
        raise _no_match_error("bucket", pattern, there)
    return matches


def fetch_object(source: SourceSettings, address: str, target: Path, *, resumable: bool = True) -> None:
    """Download one file to `target`. A partial download is kept beside it and resumed, also by a later call.

    A partial download is resumed if the bucket reports the same ETag, size and time for the file. Raises UserError with
    the client's own reason.
    """
    system = open_system(address, "s3")
    part, record = target.with_name(target.name + ".part"), target.with_name(target.name + ".part.json")
    try:
        system.invalidate_cache()
        facts = system.info(address)
        size = int(facts["size"])
        version = {"size": size, "version": str(facts.get("ETag")), "modified": str(facts.get("LastModified"))}
        known = read_json(record, "record of a begun download") if record.exists() else None
        received = part.stat().st_size if part.exists() and known == version else 0
        if received > size:
            received = 0
        write_json(record, version)
        progress = Progress(address.rpartition("/")[2], total_bytes=size)
        with part.open("ab" if received else "wb") as file:
            while received < size:
                piece = _read_range(system, address, received, min(received + BUCKET_CHUNK_BYTES, size))
                if not piece:
                    raise EOFError(f"the file ended after {received:,} of {size:,} bytes")
                file.write(piece)
                received += len(piece)
                progress(0, len(piece))
        progress.close()
    except Exception as error:
        raise access_error(address, error) from None
    part.replace(target)
    record.unlink(missing_ok=True)


def _read_range(system: Any, address: str, start: int, end: int) -> bytes:
    return system.cat_file(address, start=start, end=end)


def resolve_hub_files(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {path in the repository: local file name}, which are equal. Patterns are matched in the repository.

    Without a network, patterns are matched against `recorded`, the files of an earlier download of this corpus.
    Raises UserError for a pattern without a match, or if the files cannot be listed.
    """
    if not any(has_magic(name) for name in files):
        return {name: name for name in files}
    from huggingface_hub import HfApi

    try:
        repository_files = HfApi().list_repo_files(source.repository, repo_type="dataset", revision=source.revision)
    except Exception as error:  # the client's errors have no common base but Exception
        if not recorded:
            raise _hub_error(source, ", ".join(files), error) from None
        print(f"{source.repository}: no list from the hub; taking the files of the earlier download", flush=True)
        repository_files = recorded
    found: dict[str, str] = {}
    for pattern in files:
        matches = sorted(name for name in repository_files if name == pattern or fnmatch(name, pattern))
        if not matches:
            names, dataset = sorted(repository_files), f"{source.repository} at {source.revision}"
            raise _no_match_error("dataset", pattern, names, dataset=dataset)
        found |= {name: name for name in matches}
    return found


def fetch_hub_file(source: SourceSettings, name: str, target: Path, *, resumable: bool = True) -> None:
    """Link one file to `target` from the hub's cache, after downloading it if needed.

    The client honours HF_HOME and HF_HUB_OFFLINE. The file is copied if the cache is on another file system. Raises
    UserError with the client's own reason.
    """
    from huggingface_hub import hf_hub_download

    try:
        cached = hf_hub_download(source.repository, name, repo_type="dataset", revision=source.revision)
    except Exception as error:  # as in `resolve_hub_files`
        raise _hub_error(source, name, error) from None
    blob = Path(cached).resolve()
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        os.link(blob, part)
    except OSError:
        shutil.copyfile(blob, part)
    part.replace(target)


def _no_match_error(what: str, pattern: str, names: list[str], **facts: str) -> UserError:
    near = find_nearest(pattern, names)
    return UserError(
        f"no file of the {what} fits a source's pattern.",
        **facts,
        requested=pattern,
        has=", ".join(names[:8]) + (", …" if len(names) > 8 else ""),
        next=f"did you mean {near}?" if near else "correct `files` of the source",
    )


def _hub_error(source: SourceSettings, name: str, error: Exception) -> UserError:
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


#: kind of source → functions that download its files
DOWNLOADS = {
    "url": Downloader(resolve_urls, fetch_url),
    "bucket": Downloader(resolve_objects, fetch_object),
    "hub": Downloader(resolve_hub_files, fetch_hub_file),
}
