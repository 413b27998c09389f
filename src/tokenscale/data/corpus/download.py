"""Download of a remote source to `results/downloads/<corpus>/`: files checked by hash, and a manifest.

The configuration declares a hash after `#sha256=`. Without one, the first download records the hash in `hashes.json`
and later downloads must match it. The manifest is written last, so it lists complete files only.
"""

import importlib
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder, read_json, sha256_file, sync, write_json
from tokenscale.settings.data import FILE_LISTS, CorpusSettings, SourceSettings
from tokenscale.settings.registry import DOWNLOADS

VERSION = 1
RECORD, MANIFEST = "hashes.json", "manifest.json"


def fetch_corpus(settings: CorpusSettings, directory: Path) -> dict[str, Any]:
    """Download the files of a corpus source into `directory` and return the manifest.

    Existing files with the right hash are kept. The module of the source defines `resolve(source, files, recorded)`,
    which returns {remote name: local name}, and `fetch(source, name, target, resumable)`. Raises UserError if a file
    cannot be downloaded or its hash differs from the declared or recorded one. A file with a wrong hash is deleted.
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
    module = importlib.import_module(DOWNLOADS[source.kind])
    with lock_folder(directory, f"the download of {settings.name}"):
        record_path = directory / RECORD
        record: dict[str, str] = read_json(record_path, "record of hashes") if record_path.exists() else {}
        parts: dict[str, list[dict[str, Any]]] = {}
        used_names = {RECORD, MANIFEST}
        for key in FILE_LISTS:
            declared = dict(_split_hash(name) for name in getattr(source, key))
            listed = []
            for name, local in module.resolve(source, tuple(declared), list(record)).items():
                if local in used_names:  # two lists have a file of the same name
                    local = f"{key}-{local}"
                used_names.add(_check_local_name(local, name))
                target = directory / local
                sha256 = _download_file(module, source, name, target, declared.get(name), record)
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
    module: Any, source: SourceSettings, name: str, target: Path, declared: str | None, record: dict[str, str]
) -> str:
    """Download the file to `target` unless it is there, and return its hash. Raises UserError for a wrong hash."""
    expected = declared or record.get(name)
    if expected and target.is_file() and sha256_file(target) == expected:
        print(f"{target.name}: already here", flush=True)
        return expected
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".arriving")
    module.fetch(source, name, partial, resumable=expected is not None)
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
