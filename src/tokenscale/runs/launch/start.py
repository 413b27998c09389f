"""Execute a run from its settings to `done.json`: prepare the attempt, start the ranks, seal the record."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import failure_hints, lock
from tokenscale.runs.launch.attempts import (
    RESUME_EXIT_CODE,
    Identity,
    delete_resume_states,
    find_interrupted_step,
    hash_identity,
    is_sealed,
    prepare_attempt,
    write_done_file,
)
from tokenscale.runs.launch.command import Launch, find_job
from tokenscale.runs.launch.failure_hints import describe_hang
from tokenscale.runs.launch.repetitions import check_repetitions
from tokenscale.settings.closure import layout_code, training_code
from tokenscale.settings.continuation import parse_run_id
from tokenscale.settings.machine import Machine
from tokenscale.settings.manifests import done_file
from tokenscale.settings.run import RunSettings


@contextmanager
def open_run(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    launch: dict[str, Any] | None = None,
    wait: bool = False,
) -> Iterator[tuple[Identity, int | None, int]]:
    """Lock the folder of `output` for a run and yield (identity, number of the next attempt, lock's descriptor).

    The number is None if the run is already sealed with this identity; `output` then exists. Raises UserError for a
    missing manifest, and for a folder that another process writes, unless `wait` is set.
    """
    for role, path in manifests.items():
        if not path.is_file():
            raise UserError(
                f"the manifest of the {role.replace('_', ' ')} is missing.", path=path, next=f"snakemake {path}"
            )
    state = _find_state(run)
    directory = output.parent
    with lock.hold_run_folder(directory, run.identity, wait=wait) as held:
        # hash after locking: waiting may have taken hours
        identity = hash_identity(_to_paths(training_code(run)), manifests, _to_paths(layout_code(run)), state)
        if run.mixture is not None and not is_sealed(directory, identity):
            check_repetitions(run, manifests)
        attempt = prepare_attempt(directory, run, identity, launch)
        if attempt is None:
            print(f"{run.identity} has ended already, with this code and data; remove {directory} to train it again")
            write_done_file(directory, output, identity, run)
            delete_resume_states(directory, run)
        yield identity, attempt, held


def start_run(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    machine: Machine | None = None,
    share: int = 1,
    wait: bool = False,
) -> int:
    """Train the run in `output`'s folder unless it is already sealed, write `output` and return the exit code.

    `manifests` are the run's inputs by role (corpus, tokenizer, store, validation_store). `share` is the number of runs
    that use the nodes at the same time. Exit code 75 means that the run was stopped (time limit, preemption) and can be
    resumed. Raises UserError as `open_run` does, and if the job's nodes do not suit the run.
    """
    machine = machine or Machine()
    launched = Launch(run, machine, output.parent, share, job=find_job(machine))
    launched.check()
    with open_run(run, output, manifests, launch=launched.record(), wait=wait) as (identity, attempt, held):
        if attempt is None:
            return 0
        exit_code = launched.go(attempt, manifests, keep=(held,))
        if write_done_file(output.parent, output, identity, run):
            if exit_code:  # results were on disk before the processes were torn down
                text = f"{run.identity} is sealed; its processes then ended with {exit_code}."
                print(f"tokenscale: {text}", file=sys.stderr)
            return 0
        step = find_interrupted_step(output.parent, attempt)
        if step is not None:
            print(f"tokenscale: {run.identity} was stopped after step {step}; the next attempt goes on from there.")
            return RESUME_EXIT_CODE
        if report := describe_hang(launched.attempt_directory(attempt), run.layout.world_size):
            print(report, file=sys.stderr, flush=True)
        if machine.starter == "srun":
            print(failure_hints.describe_failure(launched.outputs(attempt)), file=sys.stderr, flush=True)
        return exit_code or 1


def _find_state(run: RunSettings) -> Path | None:
    """Return the record of the state that a run resumes from. Raises UserError if it is missing."""
    if run.resume_from is None:
        return None
    record, writer = Path(run.resume_from) / "checkpoint.json", parse_run_id(run.resume_from)
    if not record.is_file():
        raise UserError(
            "the resume state of this run is missing.",
            path=record,
            next=f"rm -r results/runs/{writer}, and snakemake {done_file(writer)} trains it again"
            if writer
            else "set resume_from to an existing state",
        )
    return record


def _to_paths(files: list[str]) -> list[Path]:
    return [Path(file) for file in files]
