"""Fingerprint of a corpus' source files, so that a rule reruns if and only if their content
changes.

Snakemake compares large files by modification time, so a copy or a `touch` would rebuild the
corpus. Hashes are cached by path, size and modification time, so each version of a file is read
once.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_record, sha256_file, sha256_text, write_json
from tokenscale.data.corpus.columns import select_part
from tokenscale.data.corpus.files import list_files, too_many_parts_error
from tokenscale.data.parts import part_folder
from tokenscale.settings.data import FILE_LISTS, CorpusSettings

#: cache beside Snakemake's own records: specific to this machine, safe to delete
MEMORY = Path(".snakemake/tokenscale-files.json")
#: larger files print a line before they are hashed
SILENT_BYTES = 1 << 30
#: list and name of a source file
Key = tuple[str, str]


def fingerprint_sources(
    corpus: CorpusSettings, folder: Path, number: int | None = None, memory: Path = MEMORY
) -> str:
    """Return a digest that changes when the source files of a corpus, or of one part, do; "" for
    sources other than `files`.

    `folder` holds the corpora (results/corpus). Planning does not read large files. Before the
    corpus is built, the digest is of the names and sizes of its files. `build.json` records that
    digest, and the hashes and modification times found by the job. The recorded digest stays valid
    until a size or a hash changes; a file is hashed here only if its modification time changed. If
    the files are missing, the recorded digest is returned, or "missing". Raises UserError if the
    corpus has no such part, or more parts than files.
    """
    if corpus.source.kind != "files":
        return ""
    directory = (
        folder / corpus.name if number is None else part_folder(folder / corpus.name, number)
    )
    recorded = _load_json(directory / "build.json")
    try:
        listed = _list_named_paths(corpus)
    except UserError:
        return recorded.get("content") or "missing"
    _check_parts(corpus, number, files=len(listed["files"]))
    paths = _select_paths(corpus, listed, number=number)
    stats = {key: path.stat() for key, path in paths.items()}
    sizes = {key: stat.st_size for key, stat in stats.items()}
    known = {(file["key"], file["name"]): file for file in recorded.get("files", [])}
    if not recorded.get("content") or sizes != {key: file["bytes"] for key, file in known.items()}:
        return _digest(sizes)
    touched = {
        key: paths[key] for key, stat in stats.items() if stat.st_mtime_ns != known[key]["mtime_ns"]
    }
    hashes = _hash_files(touched, memory) if touched else {}
    if _differ(hashes, known):
        return _digest({key: hashes.get(key) for key in sizes})
    return recorded["content"]


def _differ(hashes: dict[Key, str], known: dict[Key, dict[str, Any]]) -> bool:
    return any(sha256 != known[key]["sha256"] for key, sha256 in hashes.items())


def _check_parts(corpus: CorpusSettings, number: int | None, files: int) -> None:
    """Raise UserError for a part that the corpus does not have, and for fewer files than parts."""
    if number is not None and number >= corpus.parts:
        what = f"the corpus {corpus.name} has no part {number:05d}."
        expected = f"00000 to {corpus.parts - 1:05d}"
        raise UserError(
            what, expected=expected, next="name one of these, or change `parts` of the corpus"
        )
    if files < corpus.parts:
        raise too_many_parts_error(corpus, files=files)


def _select_paths(
    corpus: CorpusSettings, listed: dict[str, list[tuple[str, Path]]], number: int | None
) -> dict[Key, Path]:
    """Return the source files of the corpus, or of one part."""
    part = None if number is None else (number, corpus.parts)
    return {
        (key, name): path
        for key, files in listed.items()
        for name, path in select_part(files, part)
    }


def _digest(facts: Mapping[Key, object]) -> str:
    """Return a digest of one fact of each source file."""
    return sha256_text(json.dumps([[*key, fact] for key, fact in facts.items()]))[:16]


@cache
def _list_named_paths(corpus: CorpusSettings) -> dict[str, list[tuple[str, Path]]]:
    return {key: list_files(corpus.source, key) for key in FILE_LISTS}


def _hash_files(paths: dict[Key, Path], memory: Path) -> dict[Key, str]:
    """Return the hash of each file, from the cache `memory` or by reading it."""
    cache = _load_json(memory)
    changed = False
    for path in paths.values():
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = cache.get(str(path))
        if (
            not isinstance(known, dict)
            or known.get("stamp") != stamp
            or not isinstance(known.get("sha256"), str)
        ):
            if stat.st_size > SILENT_BYTES:
                print(
                    f"tokenscale: reading {path} ({stat.st_size / 1e9:.1f} GB) once, for its hash",
                    file=sys.stderr,
                )
            cache[str(path)] = {"stamp": stamp, "sha256": sha256_file(path)}
            changed = True
    if changed:
        with suppress(OSError):  # read-only project: the next parse hashes again
            write_json(memory, value=cache)
    return {key: cache[str(path)]["sha256"] for key, path in paths.items()}


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return read_record(path, what="record of hashes", unsealed=True)
    except UserError:
        return {}
