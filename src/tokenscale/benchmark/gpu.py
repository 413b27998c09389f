"""Benchmark of training on one GPU: each optimization by model, precision and kernel, beside a loop
of `transformers`.

Each case has its own process and JSON file. Cases with a file are not run again, so that an
interrupted benchmark can continue; the most valuable cases come first. Compilation is cold in each
case and timed apart from the measured steps. A case that is predicted not to fit is left out. Needs
the trainer's packages, and `transformers` for the peer. Batches are random tokens without padding;
weights are initialised on the device. Without a GPU the same code runs at toy size, and
`format_plan` lists what a GPU would run.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json, write_json
from tokenscale.costs.flops import (
    Convention,
    flops_per_token,
    hardware_flops_per_token,
    parameters,
    weights,
)
from tokenscale.costs.memory import memory
from tokenscale.costs.peaks import memory_bandwidth, peak_flops
from tokenscale.data.batches.batch import Batch
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import Energy, find_versions, read_git_state
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import OptimizerSettings, RunSettings
from tokenscale.train.models.attention import BACKENDS, choose_kernel
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import PARTS, timer_of
from tokenscale.train.record import pci_bus_id
from tokenscale.train.trainer import Trainer

WARM_UP = 5
#: timed steps of a toy case, on machines without a GPU
STEPS_WITHOUT_GPU = 3
#: measured steps: as many as fill `MEASURED_S`, within these limits
FEWEST = 10
MOST = 30
MEASURED_S = 10.0
#: assumed for the plan: seconds to start a process, seconds to compile, and the reached share of
#: the roofline
START_S = 15.0
COMPILE_S = 45.0
REACHED = 0.4
#: a case is ended after this multiple of its expected time, and this many seconds more
PATIENCE = 3.0
PATIENCE_S = 120.0
#: GPU of a plan that is made without one, and its bytes
PLANNED = ("NVIDIA H200", 139 * 2**30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="one JSON a case; finished ones stay"
    )
    plan = "print the cases, their memory and expected minutes; needs no GPU"
    limit = "begin no case that may not end within S seconds"
    parser.add_argument("--dry-run", action="store_true", help=plan)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="cases, by the beginnings of their names",
    )
    parser.add_argument("--seconds", type=_parse_positive, default=1e9, metavar="S", help=limit)
    parser.add_argument(
        "--again", action="store_true", help="repeat cases that have a file already"
    )
    parser.add_argument("--case", metavar="NAME", help="run this one case in this process")


def run(arguments: argparse.Namespace) -> None:
    """Print the plan, run one case and print it, or run every case in its own process."""
    if arguments.dry_run:
        print(format_plan())
    elif arguments.output is None:
        raise UserError(
            "benchmark gpu needs a folder for its results.",
            next="--output gpu-results, or --dry-run",
        )
    elif arguments.case:
        print(format_case(run_case(arguments.case, folder=arguments.output)))
    else:
        measure(
            arguments.output,
            names=arguments.only,
            again=arguments.again,
            budget_s=arguments.seconds,
        )


def _parse_positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


@dataclass(frozen=True)
class Case:
    """Benchmark case: a model, the batch size and the optimizations. `peer` selects the plain loop
    of transformers.
    """

    name: str
    model: str
    sequence_length: int
    rows: int
    compile: bool = False
    fused: bool = False
    loss_chunk: int = 0
    peer: bool = False
    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = "bf16-true"
    target: float | None = None  # tokens/s
    attention: str = "auto"  # a kernel of the trainer
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    float8: bool = False
    document_mask: bool = False
    vocabulary_size: int | None = None  # by default the model's, or GPT-2's

    @property
    def shape(self) -> ModelSettings:
        """The model, with its vocabulary and positions."""
        found = PRESETS[self.model]
        if self.vocabulary_size is not None:
            found = replace(found, vocabulary_size=self.vocabulary_size)
        return found.with_vocabulary(50_257).with_positions(self.sequence_length)

    @property
    def run(self) -> RunSettings:
        """Settings of the trainer."""
        names = [
            "sequence_length",
            "precision",
            "compile",
            "loss_chunk",
            "activation_checkpointing",
            "float8",
            "document_mask",
        ]
        own: dict[str, Any] = {
            "model": self.shape,
            "optimizer": OptimizerSettings(fused=self.fused),
        }
        own |= {name: getattr(self, name) for name in names}
        return RunSettings(global_batch=self.rows, micro_batch=self.rows, **own)


def _build_full(
    name: str, model: str, length: int, rows: int, target: float | None = None, **changes: Any
) -> Case:
    """Return a case with every optimization."""
    common: dict[str, Any] = {"compile": True, "fused": True, "loss_chunk": 2048, "target": target}
    return Case(
        name=f"{name}-b{rows}",
        model=model,
        sequence_length=length,
        rows=rows,
        **(common | changes),
    )


def build_ladder(name: str, model: str, length: int, rows: int, **changes: Any) -> list[Case]:
    """Return four cases from eager to every optimization, each with one change more."""
    eager = Case(
        name=f"{name}-eager-b{rows}",
        model=model,
        sequence_length=length,
        rows=rows,
        **changes,
    )
    compiled = replace(eager, name=f"{name}-compiled-b{rows}", compile=True)
    fused = replace(compiled, name=f"{name}-fused-b{rows}", fused=True)
    return [eager, compiled, fused, replace(fused, name=f"{name}-chunked-b{rows}", loss_chunk=2048)]


def _build_peer(name: str, model: str, length: int, rows: int) -> Case:
    return Case(
        name=f"{name}-transformers-b{rows}",
        model=model,
        sequence_length=length,
        rows=rows,
        peer=True,
    )


_8B = "llama-8b-nemo"
_124M = "gpt2-124m"
_355M = "gpt2-355m"
_1_4B = "llama-1.4b-nemo"
_SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
_PADDED: dict[str, Any] = {"vocabulary_size": 50_304}  # of 50,257: a multiple of 128
#: By value: cases with a target and their peers, then larger sequences and batches, then one change
#: at a time. Targets in tokens/s on an H200: what the best published trainers reach at such shapes
#: (docs/training.md).
CASES = [
    _build_full(
        "8b-2048",
        model=_8B,
        length=2048,
        rows=4,
        target=12_000,
    ),
    _build_peer(
        "8b-2048",
        model=_8B,
        length=2048,
        rows=4,
    ),
    _build_full(
        "gpt2-124m",
        model=_124M,
        length=1024,
        rows=64,
        target=520_000,
        **_PADDED,
    ),
    _build_peer(
        "gpt2-124m",
        model=_124M,
        length=1024,
        rows=64,
    ),
    _build_full(
        "8b-8192",
        model=_8B,
        length=8192,
        rows=1,
        target=9_500,
    ),
    _build_peer(
        "8b-8192",
        model=_8B,
        length=8192,
        rows=1,
    ),
    _build_full(
        "8b-8192-float8",
        model=_8B,
        length=8192,
        rows=1,
        target=14_500,
        float8=True,
    ),
    _build_full(
        "gpt2-355m",
        model=_355M,
        length=1024,
        rows=32,
        target=200_000,
        **_PADDED,
    ),
    _build_peer(
        "gpt2-355m",
        model=_355M,
        length=1024,
        rows=32,
    ),
    _build_full(
        "1.4b",
        model=_1_4B,
        length=2048,
        rows=16,
    ),
    _build_peer(
        "1.4b",
        model=_1_4B,
        length=2048,
        rows=16,
    ),
    _build_full(
        "8b-2048-selective",
        model=_8B,
        length=2048,
        rows=8,
        target=12_000,
        **_SELECTIVE,
    ),
    _build_full(
        "8b-2048-float8",
        model=_8B,
        length=2048,
        rows=4,
        float8=True,
    ),
    _build_full(
        "8b-4096",
        model=_8B,
        length=4096,
        rows=2,
    ),
    _build_full(
        "8b-4096-selective",
        model=_8B,
        length=4096,
        rows=4,
        **_SELECTIVE,
    ),
    _build_full(
        "8b-8192-selective",
        model=_8B,
        length=8192,
        rows=2,
        target=9_500,
        **_SELECTIVE,
    ),
    _build_full(
        "8b-8192-float8-selective",
        model=_8B,
        length=8192,
        rows=2,
        target=14_500,
        float8=True,
        **_SELECTIVE,
    ),
    *build_ladder(
        "8b-2048",
        model=_8B,
        length=2048,
        rows=1,
    ),
    _build_peer(
        "8b-2048",
        model=_8B,
        length=2048,
        rows=1,
    ),
    _build_full(
        "8b-2048",
        model=_8B,
        length=2048,
        rows=2,
    ),
    _build_full(
        "8b-2048-block",
        model=_8B,
        length=2048,
        rows=8,
        activation_checkpointing="block",
    ),
    *build_ladder(
        "gpt2-124m",
        model=_124M,
        length=1024,
        rows=16,
    ),
    _build_peer(
        "gpt2-124m",
        model=_124M,
        length=1024,
        rows=16,
    ),
    *(
        _build_full(
            f"1.4b-{backend}",
            model=_1_4B,
            length=2048,
            rows=8,
            attention=backend,
        )
        for backend in BACKENDS
    ),
    *(
        _build_full(
            f"gpt2-124m-{kernel}",
            model=_124M,
            length=1024,
            rows=32,
            attention=kernel,
            document_mask=True,
            **_PADDED,
        )
        for kernel in ("varlen", "flex")
    ),
    *(
        _build_full(
            f"gpt2-124m-{precision}",
            model=_124M,
            length=1024,
            rows=16,
            precision=precision,
            **_PADDED,
        )
        for precision in ("bf16", "fp16", "fp32")
    ),
    _build_full(
        "gpt2-124m-float8",
        model=_124M,
        length=1024,
        rows=16,
        float8=True,
        **_PADDED,
    ),
]
_TOY: dict[str, Any] = {"vocabulary_size": 512}
TOY = [
    case
    for model in ("llama-micro", "gpt2-micro")
    for case in (
        *build_ladder(
            model,
            model,
            length=64,
            rows=1,
            **_TOY,
        ),
        _build_full(
            model,
            model,
            length=64,
            rows=2,
            **_TOY,
            **_SELECTIVE,
        ),
        *(
            replace(
                _build_peer(
                    model,
                    model,
                    length=64,
                    rows=rows,
                ),
                **_TOY,
            )
            for rows in (1, 2)
        ),
    )
]


def roofline(case: Case, device_name: str) -> dict[str, float] | None:
    """Return the least seconds of a step by phase: the time of the matrix units or of the memory,
    nothing overlapped.

    `products`: FLOPs with causal attention over the peak of the number format; float8 is that of
    the blocks' linear layers alone. `update`: bytes of AdamW per weight, read and written once,
    with the norm of the gradients: 16 in bf16-true, 32 with fp32 weights. `elementwise`:
    activations that norms, residual sums, rotary positions, the feed-forward activation and the
    loss read and write, once each if fused, and twice as many backward. None for an unknown device.
    """
    bandwidth = memory_bandwidth(device_name)
    number = case.precision.removesuffix("-true")
    peak = peak_flops(device_name, number)
    fast = peak_flops(device_name, number="fp8" if case.float8 else number)
    if peak is None or fast is None or bandwidth is None:
        return None
    shape = case.shape
    tokens = case.rows * case.sequence_length
    count = weights(shape)
    head = shape.resolved_vocabulary_size * shape.dimension
    computed = hardware_flops_per_token(
        shape,
        sequence_length=case.sequence_length,
        convention=Convention.CAUSAL,
        checkpointing=case.activation_checkpointing,
    )
    linear = 6 * (count.matrices - head)
    if case.activation_checkpointing == "block":
        linear += 2 * (count.matrices - head)
    products = linear / fast + (computed - linear) / peak
    size = 4 if case.precision == "fp32" else 2
    gates = 3 if shape.activation == "swiglu" else 2
    rotated = shape.attention_width + shape.key_value_heads * shape.head_dimension
    layer = (
        10 * shape.dimension + 2 * rotated * (shape.positions == "rotary") + gates * shape.hidden
    )
    moved = 3 * size * shape.layers * layer + 4 * size * shape.resolved_vocabulary_size
    return {
        "products_s": tokens * products,
        "update_s": (16 if case.precision == "bf16-true" else 32) * count.total / bandwidth,
        "elementwise_s": tokens * moved / bandwidth,
        "exposed_communication_s": 0.0,  # one GPU
    }


def expected_seconds(case: Case, device_name: str) -> float:
    """Return the expected seconds of a case with its start, by its roofline; 90 for an unknown
    device.
    """
    floor = roofline(case, device_name)
    if floor is None:
        return 90.0
    step = sum(floor.values()) / REACHED
    return START_S + COMPILE_S * case.compile + (WARM_UP + count_steps(case, device_name)) * step


def count_steps(case: Case, device_name: str) -> int:
    floor = roofline(case, device_name)
    if floor is None:
        return MOST
    return max(FEWEST, min(MOST, math.ceil(MEASURED_S * REACHED / sum(floor.values()))))


def predicted_bytes(case: Case) -> int:
    """Return the predicted memory of the trainer on a GPU, of eager kernels without float8."""
    return memory(replace(case.run, float8=False, compile=False), rank=0, device="cuda").total


def format_plan() -> str:
    """Return the cases that a GPU would run: memory, roofline, target and expected minutes. Needs
    no GPU.
    """
    name, room = _read_device() if torch.cuda.is_available() else PLANNED
    lines = [
        (
            f"{'case':<32} {'memory':>9}  {'step at least':>13}  {'target':>16}  {'expected':>8}   "
            f"on {name}"
        )
    ]
    whole = 0.0
    for case in CASES:
        predicted = predicted_bytes(case)
        floor = roofline(case, device_name=name)
        fits = case.peer or predicted <= room
        whole += expected_seconds(case, device_name=name) if fits else 0.0
        target = f"{case.target:,.0f} tok/s" if case.target else ""
        lines.append(
            f"{case.name:<32} {f'{predicted / 2**30:.1f} GiB' if not case.peer else '-':>9}  "
            f"{f'{sum(floor.values()) * 1e3:.1f} ms' if floor else 'unknown':>13}  {target:>16}  "
            + (
                f"{expected_seconds(case, device_name=name) / 60:>5.1f} min"
                if fits
                else "does not fit"
            )
        )
    return "\n".join([*lines, f"together {whole / 60:.0f} minutes, of {len(CASES)} cases"])


def _read_device() -> tuple[str, int]:
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory


def measure(
    folder: Path, *, names: Sequence[str] = (), again: bool = False, budget_s: float = math.inf
) -> dict[str, Any]:
    """Run the cases without a file in `folder`, each in its own process. Returns name → record.

    `names` are prefixes that select cases. No case is started that may not end within `budget_s`
    seconds. A case that is predicted not to fit this GPU is reported and left out; the peer's
    memory is not predicted.
    """
    began = time.monotonic()
    device_name, room = _read_device() if torch.cuda.is_available() else ("cpu", 0)
    chosen = _choose_cases(names)
    paths = {name: folder / f"{name}.json" for name in chosen}
    for name, case in chosen.items():
        path = paths[name]
        if path.is_file() and not again:
            continue
        expected = expected_seconds(case, device_name)
        if time.monotonic() - began + expected > budget_s:
            print(
                f"{name}: left for another call, since it may not end within {budget_s:.0f} s",
                flush=True,
            )
            continue
        if room and not case.peer and (predicted := predicted_bytes(case)) > room:
            print(
                f"{name}: left out, does not fit: {predicted / 2**30:.0f} of "
                f"{room / 2**30:.0f} GiB",
                flush=True,
            )
            continue
        failure = _run_in_process(name, folder, limit=PATIENCE * expected + PATIENCE_S)
        if failure or not path.is_file():
            write_json(path, value={"case": asdict(case), "failed": failure or "no result"})
        print(format_case(read_json(path)), flush=True)
    return {name: read_json(path) for name, path in paths.items() if path.is_file()}


def _choose_cases(names: Sequence[str]) -> dict[str, Case]:
    """Return the cases whose names begin with one of `names`; all without names."""
    chosen = {c.name: c for c in list_cases() if not names or c.name.startswith(tuple(names))}
    if not chosen:
        facts = {
            "requested": ", ".join(names),
            "allowed": ", ".join(case.name for case in list_cases()),
        }
        raise UserError(
            "no case matches --only.", **facts, next="use an allowed name, or remove --only"
        )
    return chosen


def _run_in_process(name: str, folder: Path, limit: float) -> str:
    """Run a case in its own process, for `limit` seconds at most. Returns why it failed, or ""."""
    argv = [
        sys.executable,
        "-m",
        "tokenscale",
        "benchmark",
        "gpu",
        "--case",
        name,
        "--output",
        str(folder),
    ]
    # a compilation that was cached would not be timed
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=limit, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else ""


def list_cases() -> list[Case]:
    return CASES if torch.cuda.is_available() else TOY


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """Measure one case in this process and write `<folder>/<name>.json`."""
    case = next((c for c in CASES + TOY if c.name == name), None)
    if case is None:
        raise unknown("case", name, (c.name for c in list_cases()))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        case = replace(case, compile=False)
    name_of_device = _read_device()[0] if cuda else "cpu"
    timing = _time_case(case, device, name_of_device=name_of_device)
    record = {
        "schema": 2,
        "case": asdict(case),
        "parameters": parameters(case.shape),
        "device": name_of_device,
        **_describe_times(case, timing),
        **_describe_efficiency(case, median=timing.median, name_of_device=name_of_device),
        "memory_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "memory_predicted_bytes": None if case.peer else predicted_bytes(case),
        "joules_per_token": timing.joules_per_token(case),
        "last_loss": timing.loss,
        "kernel": timing.kernel,
        "hardware": provenance.describe_machine() | {"clocks": _read_clocks() if cuda else None},
        "versions": find_versions(),
        "git": read_git_state()[0],
    }
    write_json(folder / f"{case.name}.json", value=record)
    return record


@dataclass
class _Timing:
    """Measurements of one case: seconds of the warm-up and of steps, and of the parts of steps."""

    warm_up: list[float]
    seconds: list[float]
    laps: list[dict[str, float]]
    #: energy of the timed steps; None where it cannot be read
    joules: float | None
    loss: float
    kernel: str | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def joules_per_token(self, case: Case) -> float | None:
        if self.joules is None:
            return None
        return self.joules / (_tokens_per_step(case) * len(self.seconds))


def _time_case(case: Case, device: torch.device, name_of_device: str) -> _Timing:
    cuda = device.type == "cuda"
    energy = Energy(pci_bus_id(device))
    if case.peer:
        step = _build_peer_step(case, shape=case.shape, device=device)
    else:
        step = _build_trainer_step(case, device)
    warm_up = [_time_synchronized(step, k, cuda=cuda) for k in range(WARM_UP)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    laps: list[dict[str, float]] = []
    joules = energy.joules()
    seconds = _time_steps(
        step,
        steps=count_steps(case, device_name=name_of_device) if cuda else STEPS_WITHOUT_GPU,
        device=device,
        laps=laps,
    )
    after = energy.joules()
    used = None if joules is None or after is None else after - joules
    return _Timing(
        warm_up=warm_up,
        seconds=seconds,
        laps=laps,
        joules=used,
        loss=float(step(0)),
        kernel=None if case.peer else step.kernel,
    )


def _tokens_per_step(case: Case) -> int:
    return case.rows * case.sequence_length


def _describe_times(case: Case, timing: _Timing) -> dict[str, Any]:
    parts = None
    if timing.laps:
        parts = {
            part: statistics.median(lap.get(part, 0.0) for lap in timing.laps) for part in PARTS
        }
    return {
        "warm_up_s": timing.warm_up,
        "compile_s": timing.warm_up[0] - timing.median if case.compile else None,
        "step_s": timing.seconds,
        "parts_s": parts,
    }


def _describe_efficiency(case: Case, median: float, name_of_device: str) -> dict[str, Any]:
    """Return a step's time against the roofline, and tokens and FLOPs a second."""
    floor = roofline(case, device_name=name_of_device)
    tokens_per_s = _tokens_per_step(case) / median
    peak = peak_flops(name_of_device, number=case.run.number_format)
    flops = {
        convention.value: flops_per_token(
            case.shape, sequence_length=case.sequence_length, convention=convention
        )
        for convention in Convention
    }
    mfu = None
    if peak:
        mfu = {convention: tokens_per_s * count / peak for convention, count in flops.items()}
    return {
        "roofline_s": floor,
        "times_roofline": median / sum(floor.values()) if floor else None,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "mfu": mfu,
    }


def _time_synchronized(step: Callable[[int], object], k: int, cuda: bool) -> float:
    began = time.monotonic()
    step(k)
    if cuda:
        torch.cuda.synchronize()
    return time.monotonic() - began


def _time_steps(
    step: Callable[[int], object], steps: int, device: torch.device, laps: list[dict[str, float]]
) -> list[float]:
    """Time each step. On a GPU with events, so that the host synchronises once at the end."""
    timer = getattr(step, "timer", None)
    if timer:
        timer.read()
    if device.type != "cuda":
        seconds = [_time_synchronized(step, k, cuda=False) for k in range(steps)]
    else:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for k in range(steps):
            step(k)
            marks[k + 1].record()
        torch.cuda.synchronize()
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]
    if timer:
        laps += [lap.seconds for lap in timer.read()][-steps:]
    return seconds


def _build_trainer_step(case: Case, device: torch.device) -> Any:
    """Return a step function of the trainer, without log and data loading."""
    run = case.run
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(case.precision, torch.bfloat16)
    kernel = choose_kernel(
        case.attention,
        device=device,
        bounds=case.document_mask,
        dtype=dtype,
        dropout=run.model.dropout,
    )
    trainer = Trainer(
        run=run,
        shape=run.model,
        world=World(
            rank=0,
            size=1,
            local_rank=0,
            device=device,
        ),
        kernel=kernel,
    )
    batches = _make_batches(case)
    useful = torch.tensor(float(case.rows * case.sequence_length), device=device)
    timer = timer_of(device)

    def step(k: int) -> torch.Tensor:
        stepped = trainer.step(batches[k % len(batches)], useful, 1e-4, timer)
        timer.end()
        return stepped.loss_sum / useful

    step.timer = timer  # type: ignore[attr-defined]
    step.kernel = kernel  # type: ignore[attr-defined]
    return step


def _build_peer_step(case: Case, shape: ModelSettings, device: torch.device) -> Any:
    """Return a step function of the plain loop: the library's model in bf16, its loss, clipping,
    AdamW.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("the peer needs transformers.", reason=error, next="make setup") from None
    from tokenscale.train.models.build import build
    from tokenscale.train.models.convert_hf import to_hf

    with torch.device("meta"):
        empty = build(shape, case.sequence_length, objective="causal", kernel="sdpa")
        config, _ = to_hf(
            shape, weights=dict(empty.named_parameters()), sequence_length=case.sequence_length
        )
    config_class: Any = transformers.CONFIG_MAPPING[config["model_type"]]
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config_class(**config, use_cache=False),
            attn_implementation="sdpa",
            dtype=torch.bfloat16,
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batches = [torch.from_numpy(batch.tokens_bt) for batch in _make_batches(case)]
    if device.type == "cuda":  # copied as the trainer's are, without waiting
        batches = [batch.pin_memory() for batch in batches]

    def step(k: int) -> torch.Tensor:
        tokens = batches[k % len(batches)].to(device, non_blocking=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _make_batches(case: Case) -> list[Batch]:
    """Return four batches of random tokens; with a document mask, of documents of 256 positions."""
    random = np.random.default_rng(0)
    batches = []
    for k in range(4):
        rows = random.integers(
            0,
            min(case.shape.resolved_vocabulary_size, 50_257),
            (case.rows, case.sequence_length + 1),
        )
        batch = Batch.from_arrays(
            np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), k
        )
        if case.document_mask:
            ids = np.arange(case.sequence_length, dtype=np.int32) // 256
            batch = replace(
                batch, document_ids_bt=np.broadcast_to(ids, batch.tokens_bt.shape).copy()
            )
        batches.append(batch)
    return batches


def format_case(record: dict[str, Any]) -> str:
    case = record["case"]
    head = f"{case['name']:<32}"
    if "failed" in record:
        return f"{head} failed: {record['failed']}"
    low, high = (
        case["rows"] * case["sequence_length"] / s
        for s in (max(record["step_s"]), min(record["step_s"]))
    )
    mfu = f"{record['mfu']['full']:.1%} MFU" if record["mfu"] else "no MFU: peak unknown"
    peak = record["memory_peak_bytes"]
    predicted = record["memory_predicted_bytes"]
    used = f"{peak / 2**30:.1f} GiB" if peak else "memory not measured"
    parts = [mfu, used + (f" (predicted {predicted / 2**30:.1f})" if peak and predicted else "")]
    if record["times_roofline"]:
        parts.append(f"{record['times_roofline']:.2f}x the roofline")
    if record["compile_s"] is not None:
        parts.append(f"compiled in {record['compile_s']:.0f} s")
    if case["target"]:
        parts.append(
            f"{record['tokens_per_s'] / case['target']:.0%} of target {case['target']:,.0f}"
        )
    return (
        f"{head} {record['tokens_per_s']:>10,.0f} tokens/s ({low:,.0f}-{high:,.0f})  "
        f"{'  '.join(parts)}"
    )


def _read_clocks() -> dict[str, str] | None:
    """Query clocks and power from the driver right after the last step; None if unavailable."""
    fields = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
        return dict(
            zip(
                fields.split(","),
                (v.strip() for v in done.stdout.splitlines()[0].split(",")),
                strict=True,
            )
        )
    return None
