"""Logs of any training loop, in the form that tables and reports are made of. Standard library only: no torch.

>>> facts = {"approach": "my loop", "steps": 100, "global_batch": 8, "sequence_length": 512}
>>> with ExternalRun("results/runs/external-mine-0", **facts) as run:  # doctest: +SKIP
...     for step in range(100):
...         with run.waiting():
...             batch = next(batches)
...         loss = train(batch)  # and wait for the device: a time taken before says nothing
...         useful = int((batch.labels != -100).sum())
...         run.step(loss_sum=loss * useful, useful_tokens=useful, total_tokens=batch.labels.size, rows=8)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.runs.records.hardware import boot
from tokenscale.settings.experiments import EXTERNAL_PREFIX

#: what a run may state of itself beside what it must, with its type
STATED: dict[str, type] = {
    **{name: str for name in ("model", "corpus", "tokenizer", "precision")},
    **{name: int for name in ("micro_batch", "seed", "parameters")},
    "number_format": str,  # of the matrix products: bf16, fp16, tf32, fp32, fp8
    "flops_per_token": float,  # as the loop itself counts them: held against the formula where `shape` is there
    "mfu": float,  # as the loop itself says it, a share of 1
    "shape": dict,  # ModelSettings as a mapping, with vocabulary_size: FLOPs are then counted from it
}


class ExternalRun:
    """The log of one rank of a training that tokenscale does not run. Rank 0 writes `run.json`, sealed at the end.

    `folder` is `results/runs/external-<name>`; a rank of several says its `rank` and the `world_size`, and `device` is
    what it trains on ("NVIDIA H100 80GB HBM3", "cpu"). `approach` is the name in tables and figures, `steps` the number
    of optimizer steps asked for, `global_batch` the rows that all ranks together train on in a step. Further facts are
    those of `STATED`. Raises UserError for another folder, a fact that is unknown or of another type, numbers that no
    run has, or an attempt that was logged already.
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
        if not self.folder.name.startswith(EXTERNAL_PREFIX) or self.folder.name == EXTERNAL_PREFIX:
            expected = f"results/runs/{EXTERNAL_PREFIX}<name>"
            raise UserError(
                "a run of another program says so by its name.",
                folder=folder,
                expected=expected,
                next="rename the folder to the expected form",
            )
        if unknown := sorted(stated.keys() - set(STATED)):
            raise UserError(
                "this says nothing to a table.",
                found=", ".join(unknown),
                allowed=", ".join(STATED),
                next="use only the allowed names",
            )
        counts = {"steps": steps, "global_batch": global_batch, "sequence_length": sequence_length}
        _check({"approach": approach, **counts, "world_size": world_size, **stated})
        if not 0 <= rank < world_size:
            raise UserError(
                "there is no such rank.",
                found=rank,
                expected=f"0 to {world_size - 1}",
                next="pass a rank in the expected range",
            )
        self.rank, self.world_size = rank, world_size
        self._record = {
            "run_id": self.folder.name,
            "attempt": attempt,
            "external": {
                "approach": approach,
                "steps": steps,
                "global_batch": global_batch,
                "sequence_length": sequence_length,
                "world_size": world_size,
                **stated,
            },
            "hardware": {"device": device, "device_kind": "cpu" if device.lower().startswith("cpu") else "cuda"},
        }
        log = self.folder / f"attempt={attempt:02d}" / f"rank={rank:05d}"
        if log.exists():
            raise UserError(
                "this attempt has been logged already; a log has one writer.",
                found=log,
                next=f"another folder, or attempt={attempt + 1} for a run that goes on",
            )
        self._writer = Writer(log)
        self._step, self._waited, self._paused, self._last = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> "ExternalRun":
        if self.rank == 0:
            self._record = provenance.start(self.folder, self._record)
        self._writer.event("run_start", world_size=self.world_size, boot=boot())
        self._writer.event("init_done")
        self._last = time.monotonic()
        return self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the next batch: that share of the step is a data stall."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of a step: validation, checkpoints."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - began

    def step(self, *, loss_sum: float, useful_tokens: int, total_tokens: int, rows: int, **fields: Any) -> None:
        """One optimizer step has ended, and the device with it. All four are this rank's own: the sum of its useful
        tokens' losses in nats, labels that count, positions computed on with padding, and rows; a scalar of NumPy or
        torch will do. `fields`: any of `schema.FIELDS["steps"]`, which count for what is measured here; `step` where
        the first one is not 0."""
        now = time.monotonic()
        number = fields.pop("step", self._step)
        measured = {"t_unix_s": self._writer.unix_s(now), "t_mono_s": now, "step_s": now - self._last - self._paused}
        counts = {"useful_tokens": int(useful_tokens), "total_tokens": int(total_tokens), "rows": int(rows)}
        self._writer.step(
            **{"step": number, **measured, "data_wait_s": self._waited, "loss_sum": float(loss_sum), **counts, **fields}
        )
        self._step, self._last, self._waited, self._paused = number + 1, now, 0.0, 0.0

    def validation(self, *, loss_sum: float, useful_tokens: int, rows: int, **fields: Any) -> None:
        """The loss on a held-out slice, summed over its useful tokens, after the steps logged so far."""
        counts = {"useful_tokens": int(useful_tokens), "rows": int(rows)}
        self._writer.event("validation", step=self._step, loss_sum=float(loss_sum), **counts, **fields)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        status = "complete" if kind is None else "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        self._writer.event("run_stop", status=status, step=self._step)
        self._writer.close()
        if self.rank == 0:
            # of the other ranks some may be writing yet
            logs = sorted(self._writer.directory.glob("*.jsonl"))
            hashes = {path.relative_to(self.folder).as_posix(): sha256_file(path) for path in logs}
            provenance.seal(self.folder, self._record, {"status": status, "steps": self._step, "logs": hashes})


def _check(facts: dict[str, Any]) -> None:
    """What a run states is of the types that the tables read; a count is at least 1."""
    counts = dict.fromkeys(("steps", "global_batch", "sequence_length", "world_size"), int)
    kinds = {"approach": str, **counts, **STATED}
    for name, value in facts.items():
        kind = kinds[name]
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits:
            words = {str: "a text", int: "a whole number", float: "a number", dict: "a mapping"}[kind]
            raise UserError(
                f"{name} is {words}.",
                found=f"{value!r} ({type(value).__name__})",
                next="pass a value of the expected type",
            )
        if (name in counts and value < 1) or value == "":
            raise UserError(
                f"{name} says nothing.",
                found=repr(value),
                expected="1 or more" if name in counts else "a text",
                next="pass a value, or leave the fact out",
            )
