"""Event files of a rank: their fields and types, and a writer without torch, for any training
loop.
"""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, naming, sync

VERSION = 2
#: when buffered lines are written, and how often a status
FLUSH_LINES = 50
FLUSH_S = 5.0
STATUS_S = 2.0

#: file → field → SQL type. A field may be missing in a line (null); an unknown one is ignored by
#: readers.
FIELDS: dict[str, dict[str, str]] = {
    "steps": {
        "schema": "INTEGER",
        "step": "BIGINT",  # counted from 0
        "t_unix_s": "DOUBLE",  # end of the step, by the wall clock as it was when this log began
        "t_mono_s": "DOUBLE",  # end of the step, monotonic clock of this process
        # end of the last step to end of this one, validation and checkpoints left out
        "step_s": "DOUBLE",
        "data_wait_s": "DOUBLE",  # waiting for the batch
        # the host's bookkeeping since the step before was handed over; in step_s on a CPU
        "own_s": "DOUBLE",
        "h2d_s": "DOUBLE",  # batch to the device, as far as the device waited for it
        "forward_s": "DOUBLE",  # all micro-batches, loss included
        # all micro-batches, until the last gradients were ready to be exchanged
        "backward_s": "DOUBLE",
        # waiting for other stages of a pipeline, transfers included; null without one
        "bubble_s": "DOUBLE",
        # from then on until they had been exchanged; null where nothing is
        "exposed_communication_s": "DOUBLE",
        "optimizer_s": "DOUBLE",  # norm, clipping and update
        # the next four, and order_digest, add up over ranks: where ranks train on the same rows (a
        # tensor group, a pipeline), one of them has the values and the others zeros
        "loss_sum": "DOUBLE",  # sum of the cross-entropy over this rank's useful tokens, nats
        "useful_tokens": "BIGINT",  # labels that count, this rank
        "total_tokens": "BIGINT",  # positions computed on, padding included, this rank
        "rows": "BIGINT",  # rows of the global batch that this rank holds
        "micro_steps": "INTEGER",  # forward passes
        "learning_rate": "DOUBLE",
        "grad_norm": "DOUBLE",  # before clipping
        # grad_norm times the coefficient that the gradients were scaled with
        "grad_norm_clipped": "DOUBLE",
        # sum over this rank's slots; ranks add up modulo 2**52 (data/order/permutation.py)
        "order_digest": "BIGINT",
        "memory_peak_bytes": "BIGINT",  # allocated on the device; resident set on a CPU
        "loss_scale": "DOUBLE",  # fp16: what the loss was multiplied with
        # fp16: the gradient overflowed, nothing was changed, the scale was halved
        "skipped": "BOOLEAN",
        # the loss or the gradient norm is NaN or infinite (then written as null)
        "nonfinite": "BOOLEAN",
    },
    "spans": {
        "schema": "INTEGER",
        "name": "VARCHAR",
        "step": "BIGINT",
        "start_mono_s": "DOUBLE",
        "duration_s": "DOUBLE",
    },
    "events": {
        "schema": "INTEGER",
        # run_start, resume, init_done, memory, compilation (after the first step, and at the end if
        # it changed), validation, source_validation (of each corpus of a mixture), checkpoint,
        # translation (each by one rank), run_stop
        "event": "VARCHAR",
        "t_unix_s": "DOUBLE",
        "t_mono_s": "DOUBLE",
        "step": "BIGINT",
        # run_stop: complete, nonfinite, interrupted; checkpoint, resume: its folder
        "status": "VARCHAR",
        "world_size": "INTEGER",  # run_start: as observed by this rank
        # run_start: the boot that t_mono_s counts from, where the system names it (Linux)
        "boot": "VARCHAR",
        "loss_sum": "DOUBLE",  # validation: over the whole slice
        "useful_tokens": "BIGINT",  # validation: of the whole slice
        # validation: of them, with the largest logit; null where nobody counted
        "correct_tokens": "BIGINT",
        "rows": "BIGINT",  # validation
        "corpus": "VARCHAR",  # source_validation: of its rows
        "number": "BIGINT",  # translation: of the document in the validation split
        "source": "VARCHAR",  # translation; so the next two
        "hypothesis": "VARCHAR",
        "reference": "VARCHAR",
        "duration_s": "DOUBLE",
        "bytes": "BIGINT",  # checkpoint: on disk
        "parameters_bytes": "BIGINT",  # memory: held by this rank; so the three below
        "gradients_bytes": "BIGINT",
        "optimizer_bytes": "BIGINT",
        # of the passes in flight, and messages; null where not measured
        "activations_bytes": "BIGINT",
        # memory: sent by this rank in the step, collectives as rings do; null where not measured
        "sent_bytes": "BIGINT",
        # compilation: compiled by this rank since its model was built; so the four below
        "graphs": "INTEGER",
        "recompiles": "INTEGER",  # of the graphs: of code that had one already
        "graph_breaks": "INTEGER",
        "blocks": "INTEGER",  # of this rank's part of the model
        "eager_blocks": "INTEGER",  # of the blocks: ran outside of any graph
        # run_stop: of this rank's board, over this attempt's steps; null where nothing counts it
        "energy_j": "DOUBLE",
        # run_stop: processor time of this rank's process (user and system, all threads) since
        # init_done; null where nobody counted
        "cpu_s": "DOUBLE",
    },
}


#: made once: `json.dumps` with options of its own makes an encoder for each call
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Writer:
    """Writes `steps.jsonl`, `spans.jsonl` and `events.jsonl` below one `attempt=NN/rank=NNNNN/`
    directory.

    Lines are buffered and written, in one system call per file, after `FLUSH_LINES` lines or
    `FLUSH_S` seconds, and at `close`. A killed process loses at most the buffer and leaves at most
    one partial line. Non-finite numbers become null and set `nonfinite`.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._files = {
                name: os.open(self.directory / f"{name}.jsonl", new, 0o644) for name in FIELDS
            }
        except FileExistsError as error:
            following = f"use another folder, or the attempt after {self.directory.parent.name}"
            what = "this attempt has already been logged; a log has one writer."
            raise UserError(what, found=error.filename, next=following) from None
        self._lines: dict[str, list[str]] = {name: [] for name in FIELDS}
        self._rest = {name: bytearray() for name in FIELDS}  # of lines that the disk took in part
        self._flushed_at = time.monotonic()
        self._epoch = time.time() - time.monotonic()

    def unix_s(self, mono_s: float) -> float:
        """Convert monotonic to wall-clock time, by the offset at the log's start, so that clock
        changes keep order.
        """
        return self._epoch + mono_s

    def step(self, **fields: Any) -> None:
        self._add("steps", fields)

    def span(
        self, name: str, start_mono_s: float, duration_s: float, step: int | None = None
    ) -> None:
        self._add(
            "spans",
            {"name": name, "step": step, "start_mono_s": start_mono_s, "duration_s": duration_s},
        )

    def event(self, event: str, **fields: Any) -> float:
        """Log an event and return its monotonic time."""
        now = time.monotonic()
        self._event(now, event=event, **fields)
        return now

    def event_since(self, event: str, since: float) -> None:
        """Log an event with the seconds since the time of another one: two readings of the clock
        may be apart by what a busy machine puts between them.
        """
        now = time.monotonic()
        self._event(now, event=event, duration_s=now - since)

    def _event(self, now: float, **fields: Any) -> None:
        self._add("events", {"t_unix_s": self.unix_s(now), "t_mono_s": now, **fields})
        self.flush()

    def _add(self, name: str, fields: dict[str, Any]) -> None:
        if unknown := fields.keys() - FIELDS[name].keys():
            raise ValueError(f"{name}.jsonl has no field {sorted(unknown)}")
        record = {"schema": VERSION, **fields}
        try:
            line = _encode(record)
        except ValueError:  # a number that is not finite
            record = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in record.items()
            }
            # unless it says itself
            line = _encode({**({"nonfinite": True} if name == "steps" else {}), **record})
        self._lines[name].append(line)
        if len(self._lines[name]) >= FLUSH_LINES or time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        for name, lines in self._lines.items():
            rest = self._rest[name]
            rest += "".join(f"{line}\n" for line in lines).encode()
            lines.clear()
            with naming(self.directory / f"{name}.jsonl"):
                while rest:  # a full disk may take a part
                    del rest[: os.write(self._files[name], rest)]
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush, sync to disk and close, before process groups are torn down."""
        self.flush()
        for name, descriptor in self._files.items():
            with naming(self.directory / f"{name}.jsonl"):
                os.fsync(descriptor)
                os.close(descriptor)
        sync(self.directory)
        self._files = {}


class Status:
    """Keep `<run>/status.json` current, written at most every `STATUS_S` seconds."""

    def __init__(self, path: Path):
        self.path = path
        self._last = 0.0

    def update(self, force: bool = False, **fields: object) -> None:
        """Write fields and time if due. Errors such as a full disk are ignored, so that training
        continues.
        """
        now = time.monotonic()  # the wall clock may be set back
        if not force and now - self._last < STATUS_S:
            return
        self._last = now
        with suppress(OSError), atomic(self.path, durable=False) as temporary:
            temporary.write_text(json.dumps({"t_unix_s": round(time.time(), 3), **fields}))
