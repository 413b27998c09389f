"""What `ingest` keeps of sealed runs, so that it reads new and changed runs alone.

Runs are kept in blocks of some that follow each other in the run table, and so are the row groups
of large tables. A block ends behind a run that the run's own id chooses: one that is added changes
no block but its own.

A file holds the SHA-256 of what follows, a line of JSON, and the rows of a block as Arrow streams.
It is used only where it is whole, for runs whose logs, record, inputs and reading code are the same.
Any other run is read anew. What is kept is no evidence. `verify` reads the logs.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.kept_file import read_kept, write_kept
from tokenscale.analysis.logs import list_files
from tokenscale.analysis.run_contents import RunContents, decode_contents
from tokenscale.analysis.run_folder import InputsAtHand
from tokenscale.analysis.run_record import hash_record
from tokenscale.analysis.tables import Tables
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings.closure import ONLINE, TOKENIZER_LOADER, hash_closure
from tokenscale.settings.registry import FORMATS, TOKENIZERS

Row = dict[str, Any]

#: the code that reads runs and makes rows, with what it loads by name
READING = (
    "tokenscale.analysis.ingest",
    ONLINE,
    TOKENIZER_LOADER,
    *(form.reader for form in FORMATS.values() if form.reader is not None),
    *(kind.module for kind in TOKENIZERS.values() if kind.module is not None),
)
ENDING = ".arrow"
#: a block has so many runs on average, and logs of so many bytes or one run
BLOCK_RUNS = 64
BLOCK_BYTES = 1 << 26


@dataclass
class Block:
    """Runs that follow each other in the run table: id → entry."""

    name: str  # of its file
    entries: dict[str, Row] = field(default_factory=dict)
    #: run → digest of its record, and of its logs by size and time
    sources: dict[str, str] = field(default_factory=dict)
    log_bytes: int = 0

    def add(self, run_id: str, entry: Row, folder: Path) -> None:
        """Add a run with its sources in `folder` as they are now."""
        files = list_files(folder)
        record = hash_record(folder / "run.json")
        self.entries[run_id] = entry
        self.sources[run_id] = sha256_text(canonical_json([record, files]))
        self.log_bytes += sum(size for _, size, *_ in files if size > 0)

    def is_full(self, run_id: str) -> bool:
        """Return whether the block ends with this run."""
        return zlib.crc32(run_id.encode()) % BLOCK_RUNS == 0 or self.log_bytes > BLOCK_BYTES


@dataclass(frozen=True)
class Made:
    """Rows of one run by table, and the contents of its folder that they were made of."""

    rows: Tables
    contents: RunContents


def split_into_blocks(entries: Mapping[str, Row], runs: Path) -> list[Block]:
    """Return the blocks of a run table, id → entry, of which each has its folder in `runs`."""
    blocks = [Block("first")]
    for run_id, entry in entries.items():
        blocks[-1].add(run_id, entry, folder=runs / run_id)
        if blocks[-1].is_full(run_id):
            blocks.append(Block(f"after-{run_id}"))
    return [block for block in blocks if block.entries]


class KeptTables:
    """What is kept of the runs of one experiment, in a folder of their own; without a folder
    nothing.
    """

    def __init__(self, folder: Path | None, experiment: str, at_hand: InputsAtHand):
        self._folder = folder
        self._experiment = experiment
        self._at_hand = at_hand
        self._reading = _hash_code(READING) if folder else ""

    def read(self, block: Block, make: Callable[[Row, RunContents | None], Made]) -> Tables:
        """Return the rows of a block. `make` makes those of a run from its entry and its kept
        contents, None where it has to be read. What it returns is kept if the run is sealed, and its
        inputs could be read.
        """
        path = self._folder / f"{block.name}{ENDING}" if self._folder else None
        head, rows = read_kept(path) if path else ({}, {})
        heads = self._choose_current(block, head)
        if heads.keys() == block.entries.keys() and head.get("entries") == self._digest(block):
            return rows
        of_run = tables.split_by_run(rows, heads)
        made = {}
        for run_id, entry in block.entries.items():
            contents = None
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                columns = heads[run_id]["columns"]
                contents = decode_contents(of_run[run_id], sealed=True, columns=columns)
            made[run_id] = make(entry, contents)
        return self._keep(path, block, made)

    def finish(self, blocks: Iterable[Block]) -> None:
        """Remove the files of other blocks."""
        names = {block.name for block in blocks}
        if self._folder:
            for path in self._folder.rglob(f"*{ENDING}"):
                if path.parent != self._folder or path.stem not in names:
                    path.unlink(missing_ok=True)

    def _choose_current(self, block: Block, head: Row) -> dict[str, Row]:
        """Return run → what the head of the block's file says of it, where nothing changed."""
        current: dict[str, Row] = {}
        if head.get("reading") != self._reading:
            return current
        for run_id, sources in block.sources.items():
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                kept = head["runs"][run_id]
                at_hand = self._find_at_hand(kept["inputs"])
                if kept["sources"] == sources and kept["at_hand"] == at_hand:
                    current[run_id] = kept
        return current

    def _keep(self, path: Path | None, block: Block, made: Mapping[str, Made]) -> Tables:
        """Write the rows of a block to a file, and return them."""
        every = [of.rows for of in made.values()]
        rows = {
            name: pa.concat_tables([one[name] for one in every]).combine_chunks()
            for name in every[0]
        }
        runs = {}
        for run_id, of in made.items():
            contents = of.contents
            if contents.found.sealed and not contents.recount.failed:
                inputs = contents.recount.inputs
                runs[run_id] = {
                    "sources": block.sources[run_id],
                    "inputs": inputs,
                    "at_hand": self._find_at_hand(inputs),
                    "columns": contents.columns,
                }
        if path and runs:
            head = {
                "reading": self._reading,
                "entries": self._digest(block),
                "runs": runs,
            }
            write_kept(path, head=head, rows=rows)
        return rows

    def _digest(self, block: Block) -> str:
        return sha256_text(canonical_json([self._experiment, *block.entries.values()]))

    def _find_at_hand(self, inputs: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return manifest → the SHA-256 of the file that is at hand for it; None without one."""
        return {name: self._at_hand.hash(name, recorded) for name, recorded in inputs.items()}


def _hash_code(modules: tuple[str, ...]) -> str:
    return sha256_text(
        canonical_json(
            [tables.column_digest(), pa.__version__, *sorted(hash_closure(*modules).items())]
        )
    )
