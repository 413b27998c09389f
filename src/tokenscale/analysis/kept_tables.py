"""Tables of single sealed runs, kept so that `ingest` reads the logs of new and changed runs alone.

A file holds the SHA-256 of what follows, a line of JSON that says what the tables were made of, and
the tables of one run as Arrow streams. It is used only where it is whole and made of the same. Any
other file is made anew: of other logs, settings or code, without its end, or edited. Kept tables are
no evidence. `verify` reads the logs.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.runs import read_settings
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    atomic,
    canonical_json,
    read_json,
    sha256_file,
    sha256_text,
)
from tokenscale.settings.closure import hash_closure
from tokenscale.settings.manifests import list_manifests

Tables = dict[str, pa.Table]

#: the code that makes the tables of a run
CODE = "tokenscale.cli.ingest"
ENDING = ".arrow"


class KeptTables:
    """The kept tables of the runs of one experiment, in a folder of their own.

    `runs` is the folder of runs; `manifests` are SHA-256 → manifest of a store or corpus, where a
    run's inputs may lie beside their places in the project.
    """

    def __init__(self, folder: Path, runs: Path, manifests: Mapping[str, Path]):
        self._folder = folder
        self._runs = runs
        self._manifests = manifests
        self._hashes: dict[Path, str | None] = {}
        self._code = sha256_text(
            canonical_json([tables.column_digest(), *sorted(hash_closure(CODE).items())])
        )

    def read(self, entry: Mapping[str, Any], make: Callable[[], Tables]) -> Tables:
        """Return the tables of the run of an entry of the run table: the kept ones, or what `make`
        returns. The latter are kept if the run is sealed.
        """
        run_id = entry["run_id"]
        path = self._folder / run_id[-2:] / f"{run_id}{ENDING}"
        sources = self._describe_sources(entry)
        found = _read_tables(path, is_current=lambda head: self._is_current(head, sources))
        if found is None:
            found = make()
            (sealed,) = found["runs"]["sealed"].to_pylist()
            if sealed:
                inputs = self._list_inputs(run_id)
                at_hand = self._find_at_hand(inputs)
                _write_tables(path, found, sources=sources, inputs=inputs, at_hand=at_hand)
        return found

    def remove_others(self, run_ids: set[str]) -> None:
        """Remove the kept tables of runs that the experiment no longer has."""
        for path in self._folder.glob(f"*/*{ENDING}"):
            if path.stem not in run_ids:
                path.unlink(missing_ok=True)

    def _describe_sources(self, entry: Mapping[str, Any]) -> str:
        """Return a digest of the code, the entry, and the run's files by size and time."""
        folder = self._runs / entry["run_id"]
        files = [
            (os.path.relpath(file.path, folder), *_describe_file(file))
            for file in _list_files(folder)
        ]
        return sha256_text(canonical_json([self._code, entry, sorted(files)]))

    def _is_current(self, head: Mapping[str, Any], sources: str) -> bool:
        return head["sources"] == sources and self._find_at_hand(head["inputs"]) == head["at_hand"]

    def _list_inputs(self, run_id: str) -> dict[str, str | None]:
        """Return the manifests that a sealed run names → the SHA-256 that it recorded. Its counts are
        read again from them.
        """
        record = read_json(self._runs / run_id / "run.json")
        run = read_settings(record.get("run"))
        recorded = record.get("inputs") or {}
        return (
            {name: recorded.get(role) for role, name in list_manifests(run).items()} if run else {}
        )

    def _find_at_hand(self, inputs: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return manifest → the SHA-256 of the file that is at hand for it; None without one."""
        project = self._runs.absolute().parents[1]
        return {
            name: recorded if recorded in self._manifests else self._hash(project / name)
            for name, recorded in inputs.items()
        }

    def _hash(self, path: Path) -> str | None:
        """Return the SHA-256 of a file that many runs may name; None if it is not there."""
        if path not in self._hashes:
            self._hashes[path] = sha256_file(path) if path.is_file() else None
        return self._hashes[path]


def _list_files(folder: Path) -> list[os.DirEntry[str]]:
    if not folder.is_dir():
        return []
    found = []
    for entry in os.scandir(folder):
        found += _list_files(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else [entry]
    return found


def _describe_file(file: os.DirEntry[str]) -> tuple[int, int, int]:
    """Return (bytes, modification time in ns, inode)."""
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


def _read_tables(path: Path, is_current: Callable[[dict[str, Any]], bool]) -> Tables | None:
    """Return the tables of a file; None for one that is missing, damaged or not current."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != _hash(content):
            return None
        line, _, body = content.partition(b"\n")
        head = json.loads(line)
        if not is_current(head):
            return None
        stream = io.BytesIO(body)
        return {name: pa.ipc.open_stream(stream).read_all() for name in head["tables"]}
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return None


def _write_tables(path: Path, found: Tables, **head: Any) -> None:
    """Write the file of a run. It need not survive a power cut: its digest tells."""
    body = io.BytesIO()
    for rows in found.values():
        with pa.ipc.new_stream(body, rows.schema) as out:
            out.write_table(rows)
    line = canonical_json({"tables": list(found), **head}).encode()
    content = line + b"\n" + body.getvalue()
    with atomic(path, durable=False) as temporary:
        temporary.write_bytes(_hash(content) + b"\n" + content)


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
