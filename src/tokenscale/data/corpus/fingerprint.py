"""Fingerprint of a corpus' source files, so that a rule reruns if and only if their content changes.

Snakemake compares large files by modification time, so a copy or a `touch` would rebuild the corpus. Hashes are
cached by path, size and modification time, so each version of a file is read once. Imports only the standard
library, because every parse of the workflow runs it.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, sha256_text, write_json
from tokenscale.data.corpus.files import expand_patterns, shorten_paths
from tokenscale.settings.data import FILE_LISTS, TRANSLATION_KEYS, CorpusSettings

#: cache beside Snakemake's own records: specific to this machine, safe to delete
MEMORY = Path(".snakemake/tokenscale-files.json")
#: larger files print a line before they are hashed
SILENT_BYTES = 1 << 30


def fingerprint_corpus(corpus: CorpusSettings, folder: Path, memory: Path = MEMORY) -> str:
    """Return a digest of the names and contents of the source files; "" for sources other than `files`.

    `folder` holds the corpora (results/corpus). If the files are missing but the corpus is built, the digest comes
    from its manifest, so results copied without their raw text stay valid. Returns "missing" if both are missing.
    """
    if corpus.source.kind != "files":
        return ""
    try:
        paths = _list_paths(corpus)
    except UserError:
        return _fingerprint_manifest(folder / corpus.name / "manifest.json")
    cache = _load_cache(memory)
    facts = {key: {name: _hash(path, cache) for name, path in files.items()} for key, files in paths.items()}
    _save_cache(memory, cache)
    return _digest(facts)


def check_corpora(corpora: Iterable[CorpusSettings], folder: Path, file_of: Callable[[str], str]) -> None:
    """Raise UserError for corpora whose source files cannot be read; see `files.check_files`."""
    for corpus in corpora:
        if corpus.source.kind == "files":
            from tokenscale.data.corpus import files  # imports pyarrow, so only if needed

            files.check_files(corpus, folder, file_of)


def _list_paths(corpus: CorpusSettings) -> dict[str, dict[str, Path]]:
    return {key: shorten_paths(expand_patterns(getattr(corpus.source, key), key)) for key in FILE_LISTS}


def _fingerprint_manifest(manifest: Path) -> str:
    if not manifest.is_file():
        return "missing"
    source = read_json(manifest, "corpus manifest").get("source", {})
    return _digest({key: {f["name"]: f["sha256"] for f in source.get(key, ())} for key in FILE_LISTS})


def _digest(facts: dict[str, dict[str, str]]) -> str:
    # empty translation lists are omitted, so that corpora without translations keep their digest
    listed = {key: list(files.items()) for key, files in facts.items() if files or key in TRANSLATION_KEYS}
    return sha256_text(json.dumps(listed))[:16]


def _hash(path: Path, cache: dict[str, Any]) -> str:
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    entry = cache.get(str(path))
    if entry is None or entry["stamp"] != stamp:
        if stat.st_size > SILENT_BYTES:
            print(f"tokenscale: reading {path} ({stat.st_size / 1e9:.1f} GB) once, for its hash", file=sys.stderr)
        cache[str(path)] = {"stamp": stamp, "sha256": sha256_file(path)}
    return cache[str(path)]["sha256"]


def _load_cache(memory: Path) -> dict[str, Any]:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _save_cache(memory: Path, cache: dict[str, Any]) -> None:
    if cache == _load_cache(memory):
        return
    try:
        write_json(memory, cache)
    except OSError:  # read-only project: the next parse hashes again
        pass
