"""What `ingest` keeps of sealed runs, so that it reads and judges new and changed runs alone.

Two things are kept, each by its own key: what the files of a run gave (by these files and the code
that reads), and the row of the table `runs` (by that, the entry of the run table and all code of
`ingest`). So an edit of what judges reads no log again.

A file holds the SHA-256 of what follows, a line of JSON, and tables as Arrow streams. It is used
only where it is whole and made of the same. Any other file is made anew: of other logs, settings or
code, without its end, or edited. What is kept is no evidence. `verify` reads the logs.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.logs import list_files
from tokenscale.analysis.recount import Counts, Recount
from tokenscale.analysis.run_contents import InputsAtHand, RunContents
from tokenscale.analysis.run_record import Row, RunRecord, hash_record
from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, canonical_json, sha256_text
from tokenscale.settings.closure import ONLINE, TOKENIZER_LOADER, hash_closure
from tokenscale.settings.registry import FORMATS, TOKENIZERS

#: the code that reads a run, with what it loads by name, and the code that judges it, too
READING = (
    "tokenscale.analysis.run_contents",
    "tokenscale.analysis.kept_tables",
    ONLINE,
    TOKENIZER_LOADER,
    *(form.reader for form in FORMATS.values() if form.reader is not None),
    *(kind.module for kind in TOKENIZERS.values() if kind.module is not None),
)
JUDGING = ("tokenscale.analysis.ingest",)
ENDING = ".arrow"
#: file of all rows of the table `runs`
VERDICTS = "runs"
_COUNTED = ("steps", "useful", "total", "digests")


@dataclass(frozen=True)
class KeptContents:
    """Contents of a run, and the digest of the file that holds them; None where they are not kept."""

    contents: RunContents
    digest: str | None


class KeptTables:
    """What is kept of the runs of one experiment, in a folder of their own."""

    def __init__(self, folder: Path, runs: Path, at_hand: InputsAtHand):
        self._folder = folder
        self._runs = runs
        self._at_hand = at_hand
        self._reading = _hash_code(READING)
        self._judging = _hash_code(JUDGING)
        self._verdicts: dict[str, tuple[str, pa.Table]] = {}
        self._before: dict[str, tuple[str, pa.Table]] = {}
        if found := _read_file(self._folder / f"{VERDICTS}{ENDING}"):
            head, parts, _ = found
            rows = parts["runs"]
            self._before = {
                run_id: (key, rows.slice(place, 1)) for place, (run_id, key) in enumerate(head)
            }

    def read(self, run_id: str, make: Callable[[], RunContents]) -> KeptContents:
        """Return what the files of a run gave: the kept contents, or what `make` returns. The latter
        are kept if the run is sealed, and its inputs could be read.
        """
        path = self._folder / run_id[-2:] / f"{run_id}{ENDING}"
        # before the files are read: what changes meanwhile is read again
        sources = self._describe_sources(run_id)
        if found := _read_file(path):
            head, parts, kept_digest = found
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                at_hand = self._find_at_hand(head["recount"]["inputs"])
                if head["sources"] == sources and head["at_hand"] == at_hand:
                    return KeptContents(_decode(head, parts), digest=kept_digest)
        contents = make()
        digest: str | None = None
        if contents.found.sealed and not contents.recount.failed:
            head, parts = _encode(contents)
            at_hand = self._find_at_hand(head["recount"]["inputs"])
            digest = _write_file(
                path, head={**head, "sources": sources, "at_hand": at_hand}, parts=parts
            )
        return KeptContents(contents, digest)

    def judge(
        self, run_id: str, entry: Row, digest: str | None, make: Callable[[], Row]
    ) -> pa.Table:
        """Return the row of the table `runs`: the kept one, or what `make` returns. `digest` is that
        of the kept contents of the run.
        """
        key = sha256_text(canonical_json([self._judging, entry, digest]))
        kept_key, row = self._before.get(run_id, (None, None))
        if digest is None or key != kept_key or row is None:
            row = tables.of_rows("runs", [make()])
        if digest is not None:
            self._verdicts[run_id] = (key, row)
        return row

    def finish(self, run_ids: set[str]) -> None:
        """Keep the rows of the table `runs`, and remove what is kept of runs that the experiment no
        longer has.
        """
        verdicts = sorted(self._verdicts.items())
        rows = [tables.schema("runs").empty_table(), *(row for _, (_, row) in verdicts)]
        _write_file(
            self._folder / f"{VERDICTS}{ENDING}",
            head=[(run_id, key) for run_id, (key, _) in verdicts],
            parts={"runs": pa.concat_tables(rows).combine_chunks()},
        )
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
    recount = contents.recount
    parts = dict(contents.parts)
    head: dict[str, Any] = {
        "record": contents.found.record,
        "columns": contents.columns,
        "hashes": contents.hashes,
        "changed": contents.changed,
        "recount": asdict(replace(recount, counted="")),
    }
    if isinstance(recount.counted, str):
        head["recount"]["counted"] = recount.counted
    else:
        epoch = recount.counted.rows_per_epoch
        head["recount"]["counted"] = {
            "vocabulary_size": recount.counted.vocabulary_size,
            "rows_per_epoch": [epoch.numerator, epoch.denominator],
        }
        parts["counted"] = pa.table({name: getattr(recount.counted, name) for name in _COUNTED})
    return head, parts


def _decode(head: Mapping[str, Any], parts: dict[str, pa.Table]) -> RunContents:
    """Return the contents that `_encode` took apart."""
    recount = dict(head["recount"])
    if isinstance(recount["held_out"], dict):
        recount["held_out"] = {name: tuple(n) for name, n in recount["held_out"].items()}
    if isinstance(recount["counted"], dict):
        counted = parts.pop("counted")
        arrays: dict[str, np.ndarray] = {name: counted[name].to_numpy() for name in _COUNTED}
        recount["counted"] = Counts(
            **arrays,
            vocabulary_size=recount["counted"]["vocabulary_size"],
            rows_per_epoch=Fraction(*recount["counted"]["rows_per_epoch"]),
        )
    return RunContents(
        found=RunRecord(head["record"], sealed=True),
        columns=head["columns"],
        parts=parts,
        hashes=head["hashes"],
        changed=tuple(head["changed"]),
        recount=Recount(**recount),
    )


def _read_file(path: Path) -> tuple[Any, dict[str, pa.Table], str] | None:
    """Return (head, tables, digest) of a file; None for one that is missing or damaged."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest.decode() != _hash(content):
            return None
        line, _, body = content.partition(b"\n")
        names, head = json.loads(line)
        stream = io.BytesIO(body)
        return (
            head,
            {name: pa.ipc.open_stream(stream).read_all() for name in names},
            digest.decode(),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write_file(path: Path, head: Any, parts: Mapping[str, pa.Table]) -> str | None:
    """Write a file and return its digest; None where it cannot be written, which only costs time. It
    need not survive a power cut: its digest tells.
    """
    body = io.BytesIO()
    for rows in parts.values():
        with pa.ipc.new_stream(body, rows.schema) as out:
            out.write_table(rows)
    content = json.dumps([list(parts), head]).encode() + b"\n" + body.getvalue()
    digest = _hash(content)
    try:
        with atomic(path, durable=False) as temporary:
            temporary.write_bytes(digest.encode() + b"\n" + content)
    except (OSError, UserError):
        return None
    return digest


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
