"""One rank of an arm: another trainer in an environment of its own, on the batches and weights of a
run.

The arm's process is `<environment>/bin/python adapter.py contract.json`. This module writes the
contract (initial weights, the exact batches, learning rates), starts the process and writes its log
in the format of all runs. A run whose arm fails is sealed as failed, with the reason: the report
shows it as invalid, and other runs go on.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tokenscale.arms.contract import digest_rows
from tokenscale.arms.prepared import ARMS, python_of, read_record, source_of
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    REPLACE,
    get_boot_id,
    open_file,
    read_json,
    remove_tree,
    write_json,
    write_text,
)
from tokenscale.costs.schedule import learning_rate
from tokenscale.data.batches.batch import Batches, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.parity import recorder
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.runs.records.redaction import redact, redact_variable
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train import record as records
from tokenscale.train.models.build import build, initialise, resolve_shape
from tokenscale.train.models.convert_hf import to_hf

#: facts that an adapter's lines must have, with their types
LINE = {
    "step": int,
    "loss": float,
    "step_s": float,
    "ended_mono_s": float,
    "rows": int,
    "digest": int,
}
#: exit code of an adapter that refuses the run, with a reason
REFUSED = 3
#: seconds that the arm's process has to end
GRACE_S = 10
#: seconds that rank 0 waits for the other ranks after its own end
PATIENCE_S = 1800
#: last lines of the process's output that a reason quotes
LOG_LINES = 3


def write_contract(
    run: RunSettings,
    batches: Batches,
    folder: Path,
    *,
    record: Path | None = None,
    rank: int = 0,
    steps: int | None = None,
    device: str = "cpu",
    recording: Path | None = None,
) -> list[dict[str, Any]]:
    """Write what an arm trains on below `folder`, with `contract.json` last. Return the expected
    facts of each step.

    `record` is that of the arm's environment; None for this project's own trainer. `steps` shortens
    the run, and `recording` requests a parity recording there. The facts of a step are rows, digest
    of its tokens, useful_tokens, total_tokens, order_digest and learning_rate. Raises UserError for
    a batch with labels that do not count, which other trainers cannot ignore.
    """
    remove_tree(folder)
    (folder / "work").mkdir(parents=True)
    steps = steps or run.budget.steps
    shape = run.model.with_vocabulary(batches.vocabulary_size).with_positions(run.sequence_length)
    expected = []
    blocks = []
    for step in range(steps):
        batch = batches.next()
        if ignored := batch.total_tokens - batch.useful_tokens:
            raise UserError(
                "other trainers need full sequences in which every label counts.",
                run=run.identity,
                found=(
                    f"{ignored} labels that do not count in step {step}: padding of the store's "
                    "last sequence"
                ),
                next="choose another `seed`, or fewer steps",
            )
        blocks.append(
            np.concatenate([batch.tokens_bt, batch.labels_bt[:, -1:]], axis=1).astype(np.int32)
        )
        expected.append(
            {
                "rows": len(batch.tokens_bt),
                "digest": digest_rows(batch.tokens_bt),
                "useful_tokens": batch.useful_tokens,
                "total_tokens": batch.total_tokens,
                "order_digest": batch.order_digest,
                "learning_rate": learning_rate(
                    step,
                    steps=run.budget.steps,
                    peak=run.optimizer.learning_rate,
                    schedule=run.schedule,
                ),
            }
        )
    np.save(folder / "tokens.npy", np.stack(blocks))
    _write_weights(run, shape, folder=folder / "weights")
    for module in ("contract", "recorder"):  # what adapters may import of this project
        path = (
            Path(__file__).with_name("contract.py")
            if module == "contract"
            else Path(recorder.__file__)
        )
        (folder / "lib").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "lib" / f"{module}.py")
    here = folder.resolve()
    write_json(
        folder / "contract.json",
        value={
            "schema": 1,
            "arm": run.arm,
            "run": to_dict(run),
            "steps": steps,
            "rows": len(blocks[0]),
            "micro_batch": run.micro_batch,
            "sequence_length": run.sequence_length,
            "vocabulary_size": shape.vocabulary_size,
            "learning_rates": [facts["learning_rate"] for facts in expected],
            "schedule": dataclasses.asdict(run.schedule),
            "optimizer": dataclasses.asdict(run.optimizer),
            "shape": dataclasses.asdict(shape),
            "precision": run.precision,
            "compile": run.compile,
            "device": device,
            "seed": run.effective_seed % (1 << 32),  # NumPy's legacy generator takes no more
            "rank": rank,
            "world_size": run.layout.world_size,
            "source": str(source_of(record).resolve())
            if record and source_of(record).is_dir()
            else None,
            "folder": str(here / "work"),
            "weights": str(here / "weights"),
            "tokens": str(here / "tokens.npy"),
            "log": str(here / "steps.jsonl"),
            "result": str(here / "result.json"),
            "log_every": 1 if recording else run.log_every,
            "variables": sorted({*provenance.ENVIRONMENT, *provenance.allowed_environment()}),
            "recording": str(recording.resolve()) if recording else None,
        },
    )
    return expected


def _write_weights(run: RunSettings, shape: ModelSettings, folder: Path) -> None:
    model = build(shape, run.sequence_length, objective=run.objective, kernel="sdpa")
    initialise(model, run.effective_seed)
    config, weights = to_hf(
        shape,
        weights={name: p.detach() for name, p in model.named_parameters()},
        sequence_length=run.sequence_length,
    )
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", value=config | {"torch_dtype": "float32"})
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, str(folder / "model.safetensors"), metadata={"format": "pt"})


def run_adapter(
    arm: str,
    record: Path,
    folder: Path,
    *,
    peers: Path | None = None,
    variables: dict[str, str] | None = None,
    hang_s: float = 0,
    keep: tuple[int, ...] = (),
) -> str | None:
    """Run the arm's adapter on the contract in `folder`. Return the reason of a failure, or None.

    The process and its children are ended when another rank has written its reason below `peers`,
    and after `hang_s` seconds in which they wrote neither log nor output (0: never). The output is
    `folder/output.log`. The process inherits the file descriptors `keep`.
    """
    command = [str(python_of(record).absolute()), str((ARMS / arm / "adapter.py").resolve())]
    environment = os.environ | {
        "PYTHONPATH": str((folder / "lib").resolve()),
        "PYTHONNOUSERSITE": "1",
    }
    environment |= variables or {}
    log = folder / "output.log"
    with open(open_file(log, flags=REPLACE, follow=False), "w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                [*command, str((folder / "contract.json").resolve())],
                cwd=folder / "work",
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it
                pass_fds=keep,
            )
        except OSError as error:
            return f"the arm's process cannot be started: {command[0]}: {error.strerror}"
        written = -1
        since = time.monotonic()
        hung = False
        with _forward_signals(process):
            while process.poll() is None and not hung:
                size = sum(
                    path.stat().st_size for path in (log, folder / "steps.jsonl") if path.exists()
                )
                if size != written:
                    written = size
                    since = time.monotonic()
                hung = bool(hang_s) and time.monotonic() - since > hang_s
                if hung or (peers is not None and any(peers.glob("rank=*/arm/failed.txt"))):
                    _end(process)
                time.sleep(0.05)
    if hung:
        return f"the arm hung: it wrote neither log nor output for {hang_s:g} s  ({log})"
    if not process.returncode:
        return None
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    if process.returncode == REFUSED and lines:
        return lines[-1].removeprefix("arm: ")
    how = (
        f"exit code {process.returncode}"
        if process.returncode > 0
        else f"signal {-process.returncode}"
    )
    return redact(f"the arm's process failed ({how}): {' | '.join(lines[-LOG_LINES:])}  ({log})")


@contextmanager
def _forward_signals(process: subprocess.Popen) -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        _end(process)
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            _end(process, grace_s=0)


def _end(process: subprocess.Popen, *, grace_s: float = GRACE_S) -> None:
    with suppress(ProcessLookupError):  # all have ended already
        if grace_s:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        os.killpg(process.pid, signal.SIGKILL)
    # a process that waits for a lost file system cannot be killed
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def read_steps(
    folder: Path, expected: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the logged steps of an arm, and what is wrong with them.

    Wrong are malformed lines, other batches than the expected ones, and missing steps.
    """
    path = folder / "steps.jsonl"
    found: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for line in text.splitlines():
        try:
            step = json.loads(line)
            if any(
                not isinstance(step[name], (int, float) if kind is float else kind)
                for name, kind in LINE.items()
            ):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            return found, f"line {len(found) + 1} of the arm's log is not a step: {line[:80]}"
        number = len(found)
        if step["step"] != number or number >= len(expected):
            return (
                found,
                (
                    f"the arm logged step {step['step']} where step {number} of {len(expected)} "
                    "was "
                    "expected"
                ),
            )
        facts = expected[number]
        if (step["rows"], step["digest"]) != (facts["rows"], facts["digest"]):
            rows = (
                ""
                if step["rows"] == facts["rows"]
                else f": {step['rows']} sequences in place of {facts['rows']}"
            )
            return found, f"the arm trained on other batches than the run's in step {number}{rows}"
        found.append(step)
    if not found:
        return found, "the arm logged no step"
    if len(found) < len(expected):
        return found, f"the arm ended after {len(found)} of {len(expected)} steps"
    return found, None


def train(
    run: RunSettings,
    store: Path,
    environment: Path,
    directory: Path,
    *,
    attempt: int,
    rank: int,
    world_size: int,
    hang_s: float = 0,
) -> None:
    """Train one rank of an arm and write its log. Rank 0 seals the record once all ranks have
    ended.

    `store` is the manifest of the token store, `environment` the record of the arm's environment.
    An arm that writes nothing for `hang_s` seconds is ended (0: never). Raises UserError if the
    world is not the run's.
    """
    if world_size != run.layout.world_size:
        what = "the number of started processes is not the run's."
        next_step = "start it with `tokenscale launch`"
        raise UserError(
            what,
            run=f"{run.identity} has {run.layout.world_size} ranks",
            found=world_size,
            next=next_step,
        )
    attempt_directory = directory / f"attempt={attempt:02d}"
    writer = Writer(attempt_directory / f"rank={rank:05d}")
    folder = writer.directory / "arm"
    device = "cuda" if run.device == "auto" and torch.cuda.is_available() else "cpu"
    began = writer.event("run_start", world_size=world_size, boot=get_boot_id())
    prepared = read_record(environment)
    state = (
        _start_record(
            run,
            directory,
            attempt=attempt,
            device=device,
            prepared=prepared,
        )
        if rank == 0
        else {}
    )
    steps: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    reason = prepared["error"]
    if reason is None:
        batches = open_batches(run, inputs=Inputs(store=store, rank=rank, world_size=world_size))
        expected = write_contract(
            run,
            batches,
            folder=folder,
            record=environment,
            rank=rank,
            device=device,
        )
        state |= _count_model(run, vocabulary_size=batches.vocabulary_size)
        writer.event_since("init_done", since=began)
        print(f"{run.identity}: {run.arm}", flush=True)
        reason = run_adapter(
            run.arm,
            record=environment,
            folder=folder,
            peers=attempt_directory,
            hang_s=hang_s,
        )
        steps, wrong = read_steps(folder, expected)
        reason = reason or wrong
    _write_steps(
        writer,
        run,
        steps=steps,
        expected=expected,
    )
    status = "failed" if reason else "complete"
    writer.event("run_stop", status=status, step=len(steps))
    writer.close()
    folder.mkdir(exist_ok=True)
    if reason:
        write_text(folder / "failed.txt", text=reason)
    write_text(folder / "ended.txt", text=status)
    if rank == 0:
        _seal(
            run,
            directory,
            attempt=attempt_directory,
            state=state,
            steps=steps,
        )


def _write_steps(
    writer: Writer, run: RunSettings, steps: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    ended = None
    for step, facts in zip(steps, expected, strict=False):
        if ended is not None and step.get("paused_s"):
            # after the end of the step before, as checks attribute it
            begin = math.nextafter(ended, math.inf)
            writer.span("paused", begin, step["paused_s"], step["step"])
        ended = step["ended_mono_s"]
        loss_sum = step["loss"] * facts["useful_tokens"]
        counted = {
            name: facts[name] for name in ("rows", "useful_tokens", "total_tokens", "order_digest")
        }
        writer.step(
            step=step["step"],
            t_unix_s=writer.unix_s(step["ended_mono_s"]),
            t_mono_s=step["ended_mono_s"],
            step_s=step["step_s"],
            data_wait_s=step.get("data_wait_s"),
            loss_sum=loss_sum,
            learning_rate=facts["learning_rate"],
            micro_steps=math.ceil(facts["rows"] / run.micro_batch),
            memory_peak_bytes=step.get("memory_peak_bytes"),
            nonfinite=not math.isfinite(loss_sum),
            **counted,
        )


def _seal(
    run: RunSettings,
    directory: Path,
    attempt: Path,
    state: dict[str, Any],
    steps: list[dict[str, Any]],
) -> None:
    """Wait for the other ranks, and seal the record with the reason of the first rank that
    failed.
    """
    ranks = [attempt / f"rank={rank:05d}" / "arm" for rank in range(run.layout.world_size)]
    since = time.monotonic()
    while not all((rank / "ended.txt").is_file() for rank in ranks):
        if time.monotonic() - since > PATIENCE_S:
            raise TimeoutError(f"a rank of the arm has not ended {PATIENCE_S} s after rank 0")
        time.sleep(0.05)  # the launcher ends this process if another one dies
    reasons = [
        (rank / "failed.txt").read_text(encoding="utf-8")
        for rank in ranks
        if (rank / "failed.txt").is_file()
    ]
    outcome: dict[str, Any] = {"status": "failed" if reasons else "complete", "steps": len(steps)}
    outcome |= {
        "ended_unix_s": round(time.time(), 3),
        "begins_at": 0,
        "begins_at_useful_tokens": 0,
        "energy_j": None,
    }
    if reasons:
        outcome["reason"] = reasons[0]
        print(f"tokenscale: {run.identity} is invalid.\n  reason  {reasons[0]}", flush=True)
    result = ranks[0] / "result.json"
    state["arm"]["result"] = found = read_json(result) if result.is_file() else None
    if found:  # of the arm's process, not of this one
        state["environment"] = {
            name: redact_variable(value) for name, value in found.pop("environment").items()
        }
        state["hardware"]["threads_per_rank"] = (
            found["threads"] or state["hardware"]["threads_per_rank"]
        )
    for rank in ranks:
        for name in ("weights", "work", "lib"):  # of the inputs, the contract and the log are kept
            remove_tree(rank / name)
        (rank / "tokens.npy").unlink(missing_ok=True)
    provenance.seal_record(
        directory, record=state, outcome=outcome | {"logs": provenance.log_hashes(directory)}
    )


def _start_record(
    run: RunSettings, directory: Path, attempt: int, device: str, prepared: dict[str, Any]
) -> dict[str, Any]:
    launched = provenance.launched(directory / f"attempt={attempt:02d}")
    arm = {name: prepared.get(name) for name in ("arm", "source", "lock", "packages", "files")}
    hardware = {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "device_kind": device,
        "threads_per_rank": torch.get_num_threads(),
        "world_size": run.layout.world_size,
    }
    facts = {
        "run_id": run.identity,
        "run": to_dict(run),
        "attempt": attempt,
        "budget_steps": run.budget.steps,
    }
    return provenance.start_record(
        directory,
        record={
            **launched,
            **facts,
            "arm": arm,
            "started_unix_s": round(time.time(), 3),
            "hardware": hardware,
        },
    )


def _count_model(run: RunSettings, vocabulary_size: int) -> dict[str, Any]:
    """Return parameters and FLOPs per token, counted from the settings: the same for every arm."""
    shape = resolve_shape(run, vocabulary_size)
    with torch.device("meta"):
        model = build(shape, run.sequence_length, objective=run.objective, kernel="sdpa")
    return {"parameters": sum(p.numel() for p in model.parameters()), **records.costs(run, shape)}
