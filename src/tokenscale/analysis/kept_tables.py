"""What `ingest` keeps of sealed runs, so that it reads new and changed runs alone.

What the files of a run gave is kept by these files and the code that reads them.

A file holds the SHA-256 of what follows, a line of JSON, and tables as Arrow streams. It is used
only where it is whole and made of the same. Any other file is made anew: of other logs, settings or
code, without its end, or edited. What is kept is no evidence. `verify` reads the logs.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.logs import list_files
from tokenscale.analysis.recount import decode, encode
from tokenscale.analysis.run_contents import RunContents
from tokenscale.analysis.run_folder import InputsAtHand
from tokenscale.analysis.run_record import RunRecord, hash_record
from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, canonical_json, sha256_text
from tokenscale.settings.closure import ONLINE, TOKENIZER_LOADER, hash_closure
from tokenscale.settings.registry import FORMATS, TOKENIZERS

#: the code that reads a run, with what it loads by name
READING = (
    "tokenscale.analysis.run_folder",
    "tokenscale.analysis.kept_tables",
    ONLINE,
    TOKENIZER_LOADER,
    *(form.reader for form in FORMATS.values() if form.reader is not None),
    *(kind.module for kind in TOKENIZERS.values() if kind.module is not None),
)
ENDING = ".arrow"


class KeptTables:
    """What is kept of the runs of one experiment, in a folder of their own."""

    def __init__(self, folder: Path, runs: Path, at_hand: InputsAtHand):
        self._folder = folder
        self._runs = runs
        self._at_hand = at_hand
        self._reading = _hash_code(READING)

    def read(self, run_id: str, make: Callable[[], RunContents]) -> RunContents:
        """Return what the files of a run gave: the kept contents, or what `make` returns. The latter
        are kept if the run is sealed, and its inputs could be read.
        """
        path = self._folder / run_id[-2:] / f"{run_id}{ENDING}"
        # before the files are read: what changes meanwhile is read again
        sources = self._describe_sources(run_id)
        if found := _read_file(path):
            head, parts = found
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                at_hand = self._find_at_hand(head["recount"]["inputs"])
                if head["sources"] == sources and head["at_hand"] == at_hand:
                    return _decode(head, parts)
        contents = make()
        if contents.found.sealed and not contents.recount.failed:
            head, parts = _encode(contents)
            at_hand = self._find_at_hand(head["recount"]["inputs"])
            _write_file(path, head={**head, "sources": sources, "at_hand": at_hand}, parts=parts)
        return contents

    def finish(self, run_ids: set[str]) -> None:
        """Remove what is kept of runs that the experiment no longer has."""
        for path in self._folder.glob(f"*/*{ENDING}"):
            if path.stem not in run_ids:
                path.unlink(missing_ok=True)

    def _describe_sources(self, run_id: str) -> str:
        """Return a digest of the code that reads, the record, and the logs by size and time."""
        folder = self._runs / run_id
        record = hash_record(folder / "run.json")
        return sha256_text(canonical_json([self._reading, record, list_files(folder)]))

    def _find_at_hand(self, inputs: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return manifest → the SHA-256 of the file that is at hand for it; None without one."""
        return {name: self._at_hand.hash(name, recorded) for name, recorded in inputs.items()}


def _hash_code(modules: tuple[str, ...]) -> str:
    return sha256_text(
        canonical_json(
            [tables.column_digest(), pa.__version__, *sorted(hash_closure(*modules).items())]
        )
    )


def _encode(contents: RunContents) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Return (what JSON holds, tables) of a run's contents."""
    recount, counted = encode(contents.recount)
    head: dict[str, Any] = {
        "record": contents.found.record,
        "columns": contents.columns,
        "hashes": contents.hashes,
        "changed": contents.changed,
        "recount": recount,
    }
    return head, {**contents.parts, "counted": counted}


def _decode(head: Mapping[str, Any], parts: dict[str, pa.Table]) -> RunContents:
    """Return the contents that `_encode` took apart."""
    counted = parts.pop("counted")
    return RunContents(
        found=RunRecord(head["record"], sealed=True),
        columns=head["columns"],
        parts=parts,
        hashes=head["hashes"],
        changed=tuple(head["changed"]),
        recount=decode(head["recount"], rows=counted),
    )


def _read_file(path: Path) -> tuple[Any, dict[str, pa.Table]] | None:
    """Return (head, tables) of a file; None for one that is missing or damaged."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest.decode() != _hash(content):
            return None
        line, _, body = content.partition(b"\n")
        names, head = json.loads(line)
        stream = io.BytesIO(body)
        return head, {name: pa.ipc.open_stream(stream).read_all() for name in names}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write_file(path: Path, head: Any, parts: Mapping[str, pa.Table]) -> None:
    """Write a file. One that cannot be written only costs time, and it need not survive a power cut:
    its digest tells.
    """
    body = io.BytesIO()
    for rows in parts.values():
        with pa.ipc.new_stream(body, rows.schema) as out:
            out.write_table(rows)
    content = json.dumps([list(parts), head]).encode() + b"\n" + body.getvalue()
    with suppress(OSError, UserError), atomic(path, durable=False) as temporary:
        temporary.write_bytes(_hash(content).encode() + b"\n" + content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
