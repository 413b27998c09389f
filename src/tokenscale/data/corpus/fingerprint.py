"""The content of a corpus' own files as a short value, so that a rule reruns when, and only when, it changes.

Snakemake judges large files by their time, and a copy or a `touch` would rebuild the corpus. Hashes are kept by path,
size and time, so that each version of a file is read once. Standard library only: every parse of the workflow asks.
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

#: beside Snakemake's own records: like them it belongs to this machine, and can be deleted
MEMORY = Path(".snakemake/tokenscale-files.json")
#: below this nobody waits for a hash
SILENT_BYTES = 1 << 30


def fingerprint_corpus(corpus: CorpusSettings, folder: Path, memory: Path = MEMORY) -> str:
    """A digest over names and contents of the source's files; "" for sources that have none of their own.

    `folder` holds the corpora (results/corpus). Where the files are gone and the corpus is built, it is the digest of
    what it was built from: results that were copied without their raw text stay as they are. "missing" where both are.
    """
    if corpus.source.kind != "files":
        return ""
    try:
        paths = _list_paths(corpus)
    except UserError:
        return _fingerprint_manifest(folder / corpus.name / "manifest.json")
    known = _load_cache(memory)
    facts = {key: {name: _hash(path, known) for name, path in files.items()} for key, files in paths.items()}
    _save_cache(memory, known)
    return _digest(facts)


def check_corpora(corpora: Iterable[CorpusSettings], folder: Path, file_of: Callable[[str], str]) -> None:
    """Raise UserError for corpora whose own files cannot be read; see `files.check_files`."""
    for corpus in corpora:
        if corpus.source.kind == "files":
            from tokenscale.data.corpus import files  # pyarrow: only where there are files to look at

            files.check_files(corpus, folder, file_of)


def _list_paths(corpus: CorpusSettings) -> dict[str, dict[str, Path]]:
    return {key: shorten_paths(expand_patterns(getattr(corpus.source, key), key)) for key in FILE_LISTS}


def _fingerprint_manifest(manifest: Path) -> str:
    if not manifest.is_file():
        return "missing"
    source = read_json(manifest, "corpus manifest").get("source", {})
    return _digest({key: {f["name"]: f["sha256"] for f in source.get(key, ())} for key in FILE_LISTS})


def _digest(facts: dict[str, dict[str, str]]) -> str:
    # lists of translations only where there are some: corpora without them keep their digest
    listed = {key: list(files.items()) for key, files in facts.items() if files or key in TRANSLATION_KEYS}
    return sha256_text(json.dumps(listed))[:16]


def _hash(path: Path, known: dict[str, Any]) -> str:
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    before = known.get(str(path))
    if before is None or before["stamp"] != stamp:
        if stat.st_size > SILENT_BYTES:
            print(f"tokenscale: reading {path} ({stat.st_size / 1e9:.1f} GB) once, for its hash", file=sys.stderr)
        known[str(path)] = {"stamp": stamp, "sha256": sha256_file(path)}
    return known[str(path)]["sha256"]


def _load_cache(memory: Path) -> dict[str, Any]:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _save_cache(memory: Path, known: dict[str, Any]) -> None:
    if known == _load_cache(memory):
        return
    try:
        write_json(memory, known)
    except OSError:  # a project that may only be read: the next parse hashes again
        pass
