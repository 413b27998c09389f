"""Log any training loop in the format of tables and reports, without torch. Example:
docs/other-trainers.md.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import get_boot_id, sha256_file
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer

#: facts of a run that must be at least 1
COUNTS = ("steps", "global_batch", "sequence_length", "world_size")
#: optional facts of a run, with their types
OPTIONAL_FACTS: dict[str, type] = {
    **dict.fromkeys(("model", "corpus", "tokenizer", "precision"), str),
    **dict.fromkeys(("micro_batch", "seed", "parameters"), int),
    "number_format": str,  # of the matrix products: bf16, fp16, tf32, fp32, fp8
    # as the loop itself counts them; compared with the formula if there is a `shape`
    "flops_per_token": float,
    "mfu": float,  # as the loop itself reports it, a share of 1
    # ModelSettings as a mapping, with vocabulary_size: FLOPs are then counted from it
    "shape": dict,
}
_KINDS = {str: "a text", int: "a whole number", float: "a number", dict: "a mapping"}


class ExternalRun:
    """Log of one rank of a training run by another program. Rank 0 writes `run.json`, sealed at the
    end.

    `folder` is the run's own. Each of several ranks passes its `rank` and the
    `world_size`. `device` names the hardware ("NVIDIA H100 80GB HBM3", "cpu"). `approach` is the
    name in tables and figures, `steps` the planned number of optimizer steps, `global_batch` the
    number of sequences per step over all ranks. Further facts are those of `OPTIONAL_FACTS`. Raises
    UserError for an unknown or invalid fact, and an attempt that has already been logged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        approach: str,
        steps: int,
        global_batch: int,
        sequence_length: int,
        rank: int = 0,
        world_size: int = 1,
        attempt: int = 0,
        device: str = "cpu",
        **stated: Any,
    ):
        self.folder = Path(folder)
        for name in stated.keys() - OPTIONAL_FACTS.keys():
            raise unknown("run fact", word=name, words=OPTIONAL_FACTS)
        counts = dict(zip(COUNTS, (steps, global_batch, sequence_length, world_size), strict=True))
        facts = {"approach": approach, **counts, **stated}
        check_facts(facts)
        if not 0 <= rank < world_size:
            found = {"found": rank, "expected": f"0 to {world_size - 1}"}
            raise UserError(
                "the rank is out of range.", **found, next="pass a rank in the expected range"
            )
        self.rank = rank
        self.world_size = world_size
        self._record = {
            "run_id": self.folder.name,
            "attempt": attempt,
            "external": facts,
            "hardware": {
                "device": device,
                "device_kind": "cpu" if device.lower().startswith("cpu") else "cuda",
            },
        }
        self._writer = Writer(self.folder / f"attempt={attempt:02d}" / f"rank={rank:05d}")
        self._step = 0
        self._waited = 0.0
        self._paused = 0.0
        self._last = 0.0

    def __enter__(self) -> "ExternalRun":
        if self.rank == 0:
            self._record = provenance.start_record(self.folder, self._record)
        self._writer.event("run_start", world_size=self.world_size, boot=get_boot_id())
        self._writer.event("init_done")
        self._last = time.monotonic()
        return self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for the next batch, which counts as data stall."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from step time, such as validation and checkpoints."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._paused += seconds
            self._writer.span("paused", began, seconds, self._step)

    def step(
        self, *, loss_sum: float, useful_tokens: int, total_tokens: int, rows: int, **fields: Any
    ) -> None:
        """Log the end of an optimizer step, after synchronising the device.

        All values are of this rank: the loss summed over useful tokens in nats, the number of
        useful tokens, of all positions including padding, and of rows; NumPy and torch scalars are
        accepted. `fields` are any of `events.FIELDS["steps"]` and override values measured here;
        pass `step` if the first one is not 0. With a `step_s` of your own the time of this call is
        not logged as the end of the step.
        """
        now = time.monotonic()
        number = fields.pop("step", self._step)
        measured = {}
        if "step_s" not in fields:
            measured = {"t_unix_s": self._writer.unix_s(now), "t_mono_s": now}
            measured["step_s"] = now - self._last - self._paused
        counts = {
            "useful_tokens": int(useful_tokens),
            "total_tokens": int(total_tokens),
            "rows": int(rows),
        }
        own = {"step": number, **measured, "data_wait_s": self._waited, "loss_sum": float(loss_sum)}
        line = own | counts | fields
        self._writer.step(**line)
        self._step = number + 1
        self._last = now
        self._waited = 0.0
        self._paused = 0.0

    def validation(self, *, loss_sum: float, useful_tokens: int, rows: int, **fields: Any) -> None:
        """Log the loss on a held-out slice, summed over its useful tokens, after the steps logged
        so far.
        """
        counts = {"useful_tokens": int(useful_tokens), "rows": int(rows)}
        self._writer.event(
            "validation", step=self._step, loss_sum=float(loss_sum), **counts, **fields
        )

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            status = "complete"
        elif issubclass(kind, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "failed"
        self._writer.event("run_stop", status=status, step=self._step)
        self._writer.close()
        if self.rank == 0:
            # of the other ranks some may be writing yet
            logs = sorted(self._writer.directory.glob("*.jsonl"))
            hashes = {path.relative_to(self.folder).as_posix(): sha256_file(path) for path in logs}
            provenance.seal_record(
                self.folder,
                self._record,
                outcome={"status": status, "steps": self._step, "logs": hashes},
            )


def write_log(
    folder: Path, facts: dict[str, Any], log: dict[str, Any], steps: Iterable[dict[str, Any]]
) -> None:
    """Write the run of a log that another trainer wrote, elsewhere and earlier: nothing of this
    machine and this time enters its record.

    `facts` are those of `ExternalRun`, `log` states what was read, `steps` have the fields of a step.
    Raises UserError as `check_facts` does.
    """
    check_facts(facts)
    writer = Writer(folder / "attempt=00/rank=00000")
    for step in steps:
        writer.step(**step)
    writer.close()
    record = {"schema": 1, "run_id": folder.name, "attempt": 0, "external": facts, "log": log}
    hashes = provenance.log_hashes(folder)
    outcome = {"status": "complete", "steps": facts["steps"], "logs": hashes}
    provenance.seal_record(folder, record, outcome)


def check_facts(facts: dict[str, Any]) -> None:
    """Raise UserError for a fact that does not have the type of the tables, an empty text and a
    count below 1.
    """
    for name, value in facts.items():
        kind = int if name in COUNTS else OPTIONAL_FACTS.get(name, str)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(
            value, bool
        )
        if (
            not fits
            or value == ""
            or (name in COUNTS and value < 1)
            or (kind is float and not math.isfinite(value))
        ):
            what = f"{name} must be {_KINDS[kind]}{', 1 or more' if name in COUNTS else ''}."
            following = "pass a value of the expected type, or omit an optional fact"
            raise UserError(what, found=f"{value!r} ({type(value).__name__})", next=following)
