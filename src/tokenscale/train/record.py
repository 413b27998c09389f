"""What a rank writes of a run: the record of where and how it was computed, and the log of its
steps.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tokenscale
from tokenscale.base.files import sha256_file
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token
from tokenscale.data.batches.batch import Batch
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.settings.extensions import FOLDER
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train import profiling
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import PARTS, HostTimer
from tokenscale.train.trainer import StepResult


def start(
    run: RunSettings,
    directory: Path,
    attempt: int,
    world: World,
    launched: dict[str, Any],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Write the running record, from the launcher's facts and those known here."""
    hardware = {
        "device": device_name(world.device),
        "device_kind": world.device.type,
        "threads_per_rank": torch.get_num_threads(),
        "world_size": world.size,
        "nodes": list(world.nodes),
        "network": world.network,
        "links_gb_s": world.links,
    }
    return provenance.start_record(
        directory,
        record={
            **launched,
            "run_id": run.identity,
            "run": to_dict(run),
            "attempt": attempt,
            **facts,
            "started_unix_s": round(time.time(), 3),
            "hardware": hardware,
        },
    )


def costs(run: RunSettings, shape: ModelSettings) -> dict[str, Any]:
    """Return FLOPs per token by convention and the number format. The device's peak is looked up
    when the record is read.
    """
    counted = {
        c.value: flops_per_token(
            shape,
            sequence_length=run.sequence_length,
            convention=c,
            objective=run.objective,
        )
        for c in Convention
    }
    repeated = hardware_flops_per_token(
        shape,
        sequence_length=run.sequence_length,
        convention=Convention.FULL,
        checkpointing=run.activation_checkpointing,
        objective=run.objective,
    )
    return {"flops_per_token": counted | {"hardware": repeated}, "number_format": run.number_format}


def changed_code(record: dict[str, Any]) -> list[str]:
    """Return the source files whose content is no longer the one that the launcher recorded for
    this run.
    """
    package = Path(tokenscale.__file__).parent
    files = {
        name: Path(name) if Path(name).is_relative_to(FOLDER) else package / name
        for name in record.get("code", {})
    }
    return sorted(
        name
        for name, path in files.items()
        if not path.is_file() or sha256_file(path) != record["code"][name]
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def pci_bus_id(device: torch.device) -> str | None:
    """Return the PCI address by which NVML finds the device; None for a device that is no GPU."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)  # its type leaves the address out
    return f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


#: steps in a row whose fp16 gradients may overflow while the loss scale comes down
OVERFLOWS = 20


class StepLog:
    """Collect steps; `read` waits for the device once and writes them all. `stopped_at` is then the
    first step with a gradient that is not finite.
    """

    def __init__(
        self, writer: Writer, timer: HostTimer, world: World, *, scaled: bool, counts: bool = True
    ):
        self._writer = writer
        self._timer = timer
        self._world = world
        self._scaled = scaled
        self._share = int(counts)
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self._overflows = 0
        self.stopped_at: dict[str, Any] | None = None
        self.last: dict[str, Any] = {}

    def add(
        self, step: int, batch: Batch, rate: float, micro_steps: int, stepped: StepResult
    ) -> None:
        """Add a step whose work has been queued on the device.

        Tokens, rows, digests and losses are summed over ranks by who reads them: of the ranks that
        train on the same rows (a tensor group, a pipeline), one writes them (`counts`) and the
        others zeros.
        """
        line = {
            "step": step,
            "data_wait_s": self._timer.wait_s,
            "own_s": self._timer.own_s,
            "useful_tokens": self._share * batch.useful_tokens,
            "total_tokens": self._share * batch.total_tokens,
            "rows": self._share * len(batch.tokens_bt),
            "micro_steps": micro_steps,
            "learning_rate": rate,
            "order_digest": self._share * batch.order_digest,
        }
        self._pending.append((line, stepped))

    def __len__(self) -> int:
        return len(self._pending)

    def read(self) -> None:
        """Write the collected steps. After the first step with a gradient that is not finite, the
        rest is left out.
        """
        if not self._pending:
            return
        rows = [(s.loss_sum, s.norm, s.norm_clipped, s.bad, s.loss_scale) for _, s in self._pending]
        laps = self._timer.read()  # the one wait for the device
        if self._world.device.type == "cpu":
            numbers = [[value.item() for value in row] for row in rows]
        else:
            numbers = torch.stack([torch.stack(row) for row in rows]).tolist()
        peak = profiling.peak(self._world.device)
        for (line, _), (loss_sum, norm, clipped, bad, scale), lap in zip(
            self._pending, numbers, laps, strict=True
        ):
            self._overflows = self._overflows + 1 if bad else 0
            overflow = bool(bad) and self._scaled and self._overflows < OVERFLOWS
            line |= {
                "t_unix_s": self._writer.unix_s(lap.ended_mono_s),
                "t_mono_s": lap.ended_mono_s,
                "step_s": lap.step_s,
                **{f"{part}_s": lap.seconds[part] for part in PARTS if part in lap.seconds},
                "loss_sum": self._share * loss_sum,
                "grad_norm": norm,
                "grad_norm_clipped": clipped,
                "memory_peak_bytes": peak,
                "skipped": overflow,
                "nonfinite": (bool(bad) or not math.isfinite(loss_sum)) and not overflow,
            }
            if self._scaled:
                line["loss_scale"] = scale
            self._writer.step(**line)
            self.last = line
            if bad and not overflow:
                self.stopped_at = {
                    "step": line["step"],
                    "order_digest_of_rank_0": line["order_digest"],
                }
                break
        self._pending.clear()


class Progress:
    """Print progress on rank 0 only. On a terminal the line is rewritten; elsewhere one line is
    printed in `every_s` seconds.
    """

    def __init__(self, steps: int | None, *, enabled: bool, every_s: float = 30.0):
        self.steps = steps
        self.enabled = enabled
        self.every_s = every_s
        self.live = enabled and sys.stdout.isatty()
        self._start = time.monotonic()
        self._last = 0.0
        self._first: float | None = None

    def log(self, text: str) -> None:
        if self.enabled:
            print(("\r\033[K" if self.live else "") + text, flush=True)

    def step(self, done: int, loss: float | None, useful_per_s: float, share: float) -> None:
        """Print the progress after `done` steps; `share` of the budget is used. `loss` is None
        without a label.
        """
        if not self.enabled:
            return
        now = time.monotonic()
        last = done == self.steps
        # the first step warms everything up, and a resumed run begins where it was
        if self._first is None:
            self._first = share
            self._start = now
        if not last and now - self._last < (0.2 if self.live else self.every_s) and done > 1:
            return
        self._last = now
        written = "–" if loss is None else f"{loss:.4f}"
        text = (
            f"step {done}/{self.steps or '?'}  loss {written}  {useful_per_s:,.0f} useful tokens/s"
        )
        if share > self._first:
            text += f"  {(now - self._start) / (share - self._first) * (1 - share):.0f} s left"
        if self.live:
            print("\r\033[K" + text, end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)
