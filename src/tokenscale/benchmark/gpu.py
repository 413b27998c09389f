"""Benchmark of training on one GPU: the effect of each optimization by model, and a plain loop of `transformers`.

Each case has its own process and JSON file and takes at most 90 seconds. Cases with a file are not run again, so that
an interrupted benchmark can continue. Needs the trainer's packages, and `transformers` for the peer. Batches are random
tokens without padding; weights are initialised on the device. Without a GPU the same cases run at toy size.
"""

import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json
from tokenscale.costs.flops import Convention, flops_per_token, parameters
from tokenscale.costs.peaks import peak_flops
from tokenscale.data.batches.batch import Batch
from tokenscale.runs.records import hardware
from tokenscale.runs.records.hardware import Energy
from tokenscale.runs.records.provenance import find_versions, read_git_state
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import OptimizerSettings, RunSettings
from tokenscale.train.models.attention import choose_kernel
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import PARTS, timer_of
from tokenscale.train.record import pci_bus_id
from tokenscale.train.trainer import Trainer

#: time limit of a case in seconds, including its start
LIMIT_S = 90
WARM_UP, STEPS = 5, 30


@dataclass(frozen=True)
class Case:
    """Benchmark case: a model, the batch size and the optimizations. `peer` selects the plain loop of transformers."""

    name: str
    model: str
    sequence_length: int
    rows: int
    compile: bool = False
    fused: bool = False
    loss_chunk: int = 0
    peer: bool = False
    precision: Literal["bf16", "bf16-true"] = "bf16-true"
    target: float | None = None  # tokens/s
    attention: str = "auto"


def build_ladder(
    name: str, model: str, length: int, first: int, larger: tuple[int, ...], target: float | None
) -> list[Case]:
    """Return cases of increasing optimization (eager to larger batches), and the peer at the extreme batch sizes."""
    eager = Case(f"{name}-eager-b{first}", model, length, first)
    compiled = replace(eager, name=f"{name}-compiled-b{first}", compile=True)
    fused = replace(compiled, name=f"{name}-fused-b{first}", fused=True)
    chunked = replace(fused, name=f"{name}-chunked-b{first}", loss_chunk=2048)
    grown = [replace(chunked, name=f"{name}-chunked-b{rows}", rows=rows, target=target) for rows in larger]
    whole = replace(fused, name=f"{name}-fused-b{larger[-1]}", rows=larger[-1], target=target)
    peers = [replace(eager, name=f"{name}-transformers-b{rows}", rows=rows, peer=True) for rows in (first, larger[-1])]
    return [eager, compiled, fused, chunked, *grown, whole, *peers]


#: targets: at least half of the peak for the 8B shape, and the throughput of hand-written CUDA for GPT-2
CASES = [
    *build_ladder("8b", "llama-8b-nemo", 2048, 1, (2, 4), 11_000),
    *build_ladder("1.4b", "llama-1.4b-nemo", 2048, 8, (16,), None),
    *build_ladder("gpt2-124m", "gpt2-124m", 1024, 16, (32, 64), 430_000),
    *build_ladder("gpt2-355m", "gpt2-355m", 1024, 8, (16, 32), 165_000),
]
TOY = [
    *build_ladder("llama-micro", "llama-micro", 64, 1, (2,), None),
    *build_ladder("gpt2-micro", "gpt2-micro", 64, 1, (2,), None),
]
TOY_VOCABULARY = 512


def measure(
    folder: Path, *, names: Sequence[str] = (), again: bool = False, budget_s: float = math.inf
) -> dict[str, Any]:
    """Run the cases without a file in `folder`, each in its own process. Returns name → record.

    `names` are prefixes that select cases. No case is started that may not end within `budget_s` seconds.
    """
    began = time.monotonic()
    cases = [c for c in list_cases() if not names or any(c.name.startswith(name) for name in names)]
    if not cases:
        known = ", ".join(case.name for case in list_cases())
        raise UserError(
            "no case matches --only.",
            requested=", ".join(names),
            allowed=known,
            next="use an allowed name, or remove --only",
        )
    for case in cases:
        path = folder / f"{case.name}.json"
        if path.is_file() and not again:
            continue
        if time.monotonic() - began + LIMIT_S > budget_s:
            print(f"{case.name}: left for another call, since it may not end within {budget_s:.0f} s", flush=True)
            break
        argv = [sys.executable, "-m", "tokenscale", "benchmark", "gpu", "--case", case.name, "--output", str(folder)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
            failed = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            failed = [f"not done within {LIMIT_S} s"]
        if failed or not path.is_file():
            write_json(path, {"case": asdict(case), "failed": (failed or ["no result"])[0]})
        print(format_case(read_json(path)), flush=True)
    return {c.name: read_json(folder / f"{c.name}.json") for c in cases if (folder / f"{c.name}.json").is_file()}


def list_cases() -> list[Case]:
    """Return the cases for this machine."""
    return CASES if torch.cuda.is_available() else TOY


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """Measure one case in this process and write `<folder>/<name>.json`."""
    case = next((c for c in CASES + TOY if c.name == name), None)
    if case is None:
        raise UserError(
            "unknown case.",
            requested=name,
            allowed=", ".join(c.name for c in list_cases()),
            next="choose one of the allowed names",
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.set_float32_matmul_precision("high")
    shape = PRESETS[case.model].with_vocabulary(TOY_VOCABULARY if case in TOY else 50_257)
    shape = shape.with_positions(case.sequence_length)
    energy = Energy(pci_bus_id(device))
    step = _build_peer_step(case, shape, device) if case.peer else _build_trainer_step(case, shape, device)
    for k in range(WARM_UP):
        loss = step(k)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    laps: list[dict[str, float]] = []
    joules, steps = energy.joules(), STEPS if cuda else 3
    seconds = _time_steps(step, steps, device, laps)
    used = None if joules is None else energy.joules() - joules
    tokens = case.rows * case.sequence_length
    name_of_device = torch.cuda.get_device_name(device) if cuda else "cpu"
    peak = peak_flops(name_of_device)
    speed = tokens / statistics.median(seconds)
    flops = {c.value: flops_per_token(shape, case.sequence_length, c) for c in Convention}
    record = {
        "schema": 1,
        "case": asdict(case),
        "parameters": parameters(shape),
        "device": name_of_device,
        "step_s": seconds,
        "parts_s": {part: statistics.median(lap.get(part, 0.0) for lap in laps) for part in PARTS} if laps else None,
        "tokens_per_s": speed,
        "flops_per_token": flops,
        "mfu": {convention: speed * count / peak for convention, count in flops.items()} if peak else None,
        "memory_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "joules_per_token": used / (tokens * steps) if used is not None else None,
        "last_loss": float(loss),
        "kernel": None if case.peer else step.kernel,
        "hardware": hardware.describe_machine() | {"clocks": _read_clocks() if cuda else None},
        "versions": find_versions(),
        "git": read_git_state()[0],
    }
    write_json(folder / f"{case.name}.json", record)
    return record


def _time_steps(step: Any, steps: int, device: torch.device, laps: list[dict[str, float]]) -> list[float]:
    """Time each step. On a GPU with events, so that the host synchronises once at the end."""
    if device.type != "cuda":
        seconds = []
        for k in range(steps):
            began = time.monotonic()
            step(k)
            seconds.append(time.monotonic() - began)
        if hasattr(step, "timer"):
            laps += [lap.seconds for lap in step.timer.read()][-steps:]
        return seconds
    if hasattr(step, "timer"):
        step.timer.read()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for k in range(steps):
        step(k)
        marks[k + 1].record()
    torch.cuda.synchronize()
    if hasattr(step, "timer"):
        laps += [lap.seconds for lap in step.timer.read()][-steps:]
    return [a.elapsed_time(b) / 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]


def _build_trainer_step(case: Case, shape: ModelSettings, device: torch.device) -> Any:
    """Return a step function of the trainer, without log and data loading."""
    run = RunSettings(
        model=shape,
        sequence_length=case.sequence_length,
        global_batch=case.rows,
        micro_batch=case.rows,
        precision=case.precision,
        compile=case.compile and device.type == "cuda",
        loss_chunk=case.loss_chunk,
        optimizer=OptimizerSettings(fused=case.fused),
    )
    kernel = choose_kernel(case.attention, device=device, bounds=False, dtype=torch.bfloat16, dropout=shape.dropout)
    with device:
        trainer = Trainer(run, shape, World(0, 1, 0, device), kernel, initial=_initialise_weights)
    batches = _make_batches(case, shape)
    useful = torch.tensor(float(case.rows * case.sequence_length), device=device)
    timer = timer_of(device)

    def step(k: int) -> torch.Tensor:
        stepped = trainer.step(batches[k % len(batches)], useful, 1e-4, timer)
        timer.end()
        return stepped.loss_sum / useful

    step.timer, step.kernel = timer, kernel  # type: ignore[attr-defined]
    return step


def _initialise_weights(model: torch.nn.Module, seed: int) -> None:
    """Initialise weights in place with their usual scale."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0) if weight.dim() < 2 else weight.normal_(0, 0.02)


def _build_peer_step(case: Case, shape: ModelSettings, device: torch.device) -> Any:
    """Return a step function of the plain loop: the library's model in bf16, its loss, clipping, AdamW."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("the peer needs transformers.", reason=error, next="make setup") from None
    from tokenscale.train.models.build import build
    from tokenscale.train.models.convert_hf import to_hf

    with torch.device("meta"):
        empty = build(shape, case.sequence_length, objective="causal", kernel="sdpa")
        config, _ = to_hf(shape, dict(empty.named_parameters()), case.sequence_length)
    config_class: Any = transformers.CONFIG_MAPPING[config["model_type"]]
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config_class(**config, use_cache=False), attn_implementation="sdpa", dtype=torch.bfloat16
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batches = [torch.from_numpy(batch.tokens_bt) for batch in _make_batches(case, shape)]

    def step(k: int) -> torch.Tensor:
        tokens = batches[k % len(batches)].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _make_batches(case: Case, shape: ModelSettings) -> list[Batch]:
    """Return four batches of random tokens."""
    random = np.random.default_rng(0)
    size = (case.rows, case.sequence_length + 1)
    rows = [random.integers(0, shape.vocabulary_size, size) for _ in range(4)]
    return [
        Batch.from_arrays(np.ascontiguousarray(r[:, :-1]), np.ascontiguousarray(r[:, 1:]), k)
        for k, r in enumerate(rows)
    ]


def format_case(record: dict[str, Any]) -> str:
    """Format a case as one line."""
    case = record["case"]
    head = f"{case['name']:<28}"
    if "failed" in record:
        return f"{head} failed: {record['failed']}"
    low, high = (case["rows"] * case["sequence_length"] / s for s in (max(record["step_s"]), min(record["step_s"])))
    mfu = f"{record['mfu']['full']:.1%} MFU" if record["mfu"] else "no MFU: peak unknown"
    memory = f"{record['memory_peak_bytes'] / 2**30:.1f} GiB" if record["memory_peak_bytes"] else "memory not measured"
    target = f"  target {case['target']:,.0f}" if case["target"] else ""
    return f"{head} {record['tokens_per_s']:>10,.0f} tokens/s ({low:,.0f}-{high:,.0f})  {mfu}  {memory}{target}"


def format_table(records: dict[str, Any]) -> str:
    """Format all cases in order."""
    return "\n".join(format_case(record) for record in records.values())


def _read_clocks() -> dict[str, str] | None:
    """Query clocks and power from the driver right after the last step; None if unavailable."""
    fields = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return dict(zip(fields.split(","), (v.strip() for v in done.stdout.splitlines()[0].split(",")), strict=True))
    return None
