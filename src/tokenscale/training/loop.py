"""One run on one rank: build, loop, record."""

import importlib
import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenscale.batches.ahead import Ahead
from tokenscale.batches.held_out import read_slice
from tokenscale.batches.open import open_batches
from tokenscale.costs.flops import parameters
from tokenscale.errors import UserError
from tokenscale.evaluation import validation
from tokenscale.files import read_json, sha256_file
from tokenscale.models.build import build, initialise
from tokenscale.order.shares import micro_steps
from tokenscale.parallel.world import World
from tokenscale.records import provenance
from tokenscale.records.events import Writer
from tokenscale.records.status import Status
from tokenscale.settings.options import to_dict
from tokenscale.settings.registry import PARALLEL
from tokenscale.settings.run import RunSettings
from tokenscale.training.optimizer import adamw, clip
from tokenscale.training.progress import Progress
from tokenscale.training.schedule import learning_rate
from tokenscale.training.step import autocast_of, backward


@dataclass(frozen=True)
class Inputs:
    """Directories that a run reads; None for what its approach does not need."""

    corpus: Path | None = None
    tokenizer: Path | None = None
    store: Path | None = None
    validation_store: Path | None = None


def train(run: RunSettings, inputs: Inputs, directory: Path, world: World, attempt: int = 0) -> torch.nn.Module:
    """Train to the end of the budget, writing events below `directory/attempt=NN/rank=NNNNN/` and `directory/run.json`.

    Returns the trained model (wrapped as its layout wraps it). A loss that is not finite ends the run: the record is
    sealed with that outcome, and the batch is named.
    """
    started = time.monotonic()
    torch.manual_seed(run.effective_seed)
    attempt_directory = directory / f"attempt={attempt:02d}"
    writer = Writer(attempt_directory / f"rank={world.rank:05d}")
    writer.event("run_start", world_size=world.size)
    batches = open_batches(
        run,
        corpus_directory=inputs.corpus,
        tokenizer_directory=inputs.tokenizer,
        store_directory=inputs.store,
        rank=world.rank,
        world_size=world.size,
    )
    if run.prefetch:
        batches = Ahead(batches)
    shape = run.model.with_vocabulary(batches.vocabulary_size)
    if shape.vocabulary_size < batches.vocabulary_size:
        raise UserError(
            "the tokenizer has more entries than the model's embedding.",
            run=f"{run.identity} has model.vocabulary_size {shape.vocabulary_size}",
            tokenizer=f"{run.tokenizer.name} has {batches.vocabulary_size}",
            next="leave model.vocabulary_size out: it is then the tokenizer's",
        )
    model = build(shape, run.sequence_length, objective=run.objective, kernel="sdpa")
    shape = model.settings
    initialise(model, run.effective_seed)
    model = model.to(world.device)
    model = importlib.import_module(PARALLEL[run.layout.method]).apply(model, run.layout, world)
    optimizer = adamw(model, run.optimizer)
    autocast = autocast_of(run.precision, world.device)
    held_out = None
    if run.validation.rows:
        held_out = read_slice(run, inputs.validation_store, batches.vocabulary_size, world.rank, world.size)
    record = _start_record(run, directory, attempt, world, parameters(shape)) if world.rank == 0 else {}
    status = Status(directory / "status.json")
    progress = Progress(run.budget.steps, enabled=world.rank == 0)
    progress.say(
        f"{run.identity}  {parameters(shape):,} parameters  {world.size} rank(s) on {_device_name(world.device)}"
    )
    writer.event("init_done", duration_s=time.monotonic() - started)

    def validate(step: int) -> None:
        began = time.monotonic()
        loss_sum, useful = validation.loss(model, held_out, run.micro_batch, world, autocast)
        if world.rank == 0:
            writer.event(
                "validation",
                step=step,
                loss_sum=loss_sum,
                useful_tokens=useful,
                rows=held_out.global_rows,
                duration_s=time.monotonic() - began,
            )

    if held_out:
        validate(0)
    passes = micro_steps(run.global_batch, world.size, run.micro_batch)
    began = time.monotonic()
    for step in range(run.budget.steps):
        batch = batches.next()
        loaded = time.monotonic()
        rate = learning_rate(step, run.budget.steps, run.optimizer.learning_rate, run.schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum = backward(
            model, batch, micro_batch=run.micro_batch, micro_steps=passes, world=world, autocast=autocast
        ).item()
        differentiated = time.monotonic()
        norm, clipped = clip(model, run.optimizer.clip_norm)
        finite = math.isfinite(norm)  # of the exchanged gradient, so that every rank comes to the same answer
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        ended = time.monotonic()
        writer.step(
            step=step,
            t_unix_s=time.time(),
            t_mono_s=ended,
            step_s=ended - began,
            data_wait_s=loaded - began,
            forward_backward_s=differentiated - loaded,
            optimizer_s=ended - differentiated,
            loss_sum=loss_sum,
            useful_tokens=batch.useful_tokens,
            total_tokens=batch.total_tokens,
            rows=len(batch.tokens_bt),
            micro_steps=passes,
            learning_rate=rate,
            grad_norm=norm,
            grad_norm_clipped=clipped,
            order_digest=batch.order_digest,
            memory_peak_bytes=_peak_memory(world.device),
            nonfinite=not finite,
        )
        if not finite:
            break
        mean = loss_sum / max(batch.useful_tokens, 1)
        progress.step(step + 1, mean, batch.useful_tokens * world.size / (ended - began))
        if world.rank == 0:
            status.update(step=step + 1, steps=run.budget.steps, loss=mean, state="running")
        last = step + 1 == run.budget.steps
        if held_out and (last or (run.validation.every and (step + 1) % run.validation.every == 0)):
            validate(step + 1)
            ended = time.monotonic()
        began = ended
    if isinstance(batches, Ahead):
        batches.close()
    done = run.budget.steps if finite else step
    state = "complete" if finite else "nonfinite"
    writer.event("run_stop", status=state, step=done)
    writer.close()
    world.barrier()  # every rank's files are complete before the record that names their hashes
    if world.rank == 0:
        outcome = {"status": state, "steps": done, "ended_unix_s": round(time.time(), 3)}
        if not finite:
            outcome["stopped_at"] = {"step": step, "order_digest_of_rank_0": batch.order_digest}
        provenance.seal(directory, record, outcome | {"logs": _log_hashes(directory, attempt_directory)})
        status.update(force=True, step=done, steps=run.budget.steps, state=state)
        progress.say(f"{state}: {directory}/run.json")
        if not finite:
            progress.say(
                f"  the gradient is not finite at step {step} (order digest {batch.order_digest} on rank 0)\n"
                "  next  lower optimizer.learning_rate, lengthen schedule.warmup_steps, or use precision fp32"
            )
    world.barrier()
    return model


def _start_record(run: RunSettings, directory: Path, attempt: int, world: World, weights: int) -> dict[str, Any]:
    """Write the running record, from what the launcher left for this attempt and what is known here."""
    prepared = directory / f"attempt={attempt:02d}" / "attempt.json"
    launched = read_json(prepared, "attempt's record") if prepared.is_file() else {}
    hardware = {
        "device": _device_name(world.device),
        "device_kind": world.device.type,
        "threads_per_rank": torch.get_num_threads(),
        "world_size": world.size,
    }
    return provenance.start(
        directory,
        {
            **launched,
            "run_id": run.identity,
            "run": to_dict(run),
            "attempt": attempt,
            "parameters": weights,
            "started_unix_s": round(time.time(), 3),
            "hardware": hardware,
        },
    )


def _log_hashes(directory: Path, attempt_directory: Path) -> dict[str, str]:
    files = sorted(attempt_directory.glob("rank=*/*.jsonl"))
    return {str(f.relative_to(directory)): sha256_file(f) for f in files}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
