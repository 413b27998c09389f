"""One run from its settings to `done.json`: make room, start the ranks, seal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import failure_hints, lock
from tokenscale.runs.launch import hang_report as standing
from tokenscale.runs.launch.attempts import AGAIN, Identity, drop_states, finish, identity_of, interrupted, prepare
from tokenscale.runs.launch.command import Launch, job_of
from tokenscale.settings.closure import layout_code, training_code
from tokenscale.settings.continuation import parse_run_id
from tokenscale.settings.machine import Machine
from tokenscale.settings.manifests import done_file
from tokenscale.settings.run import RunSettings


@contextmanager
def opened(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    launch: dict[str, Any] | None = None,
    wait: bool = False,
) -> Iterator[tuple[Identity, int | None, int]]:
    """Hold the folder of `output` for a run: (its identity, the number of the attempt to make, the lock's descriptor).

    The number is None where the run is sealed there with this identity; `output` is then there, too. Raises UserError
    for a missing manifest and for a folder that another process writes; with `wait`, it waits for that one's end.
    """
    for role, path in manifests.items():
        if not path.is_file():
            raise UserError(
                f"the manifest of the {role.replace('_', ' ')} is missing.", path=path, next=f"snakemake {path}"
            )
    state = _state(run)
    directory = output.parent
    with lock.held(directory, run.identity, wait=wait) as held:
        # read once the folder is ours: waiting may have taken hours
        identity = identity_of(_paths(training_code(run)), manifests, _paths(layout_code(run)), state)
        attempt = prepare(directory, run, identity, launch)
        if attempt is None:
            print(f"{run.identity} has ended already, with this code and data; remove {directory} to train it again")
            finish(directory, output, identity, run)
            drop_states(directory, run)
        yield identity, attempt, held


def start(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    machine: Machine | None = None,
    share: int = 1,
    wait: bool = False,
) -> int:
    """Train the run in `output`'s folder unless it is sealed there already; write `output`. Returns the exit code.

    `manifests` are the run's inputs by role (corpus, tokenizer, store, validation_store); `share` is how many runs have
    its nodes at the same time. The code is 75 where the run was stopped in time to go on (a time limit, preemption):
    to be started again. Raises UserError as `opened` does, and where the job has other nodes than the run needs.
    """
    machine = machine or Machine()
    launched = Launch(run, machine, output.parent, share, job=job_of(machine))
    launched.check()
    with opened(run, output, manifests, launch=launched.record(), wait=wait) as (identity, attempt, held):
        if attempt is None:
            return 0
        exit_code = launched.go(attempt, manifests, keep=(held,))
        if finish(output.parent, output, identity, run):
            if exit_code:  # what counts was on disk before the processes were torn down
                text = f"{run.identity} is sealed; its processes then ended with {exit_code}."
                print(f"tokenscale: {text}", file=sys.stderr)
            return 0
        step = interrupted(output.parent, attempt)
        if step is not None:
            print(f"tokenscale: {run.identity} was stopped after step {step}; the next attempt goes on from there.")
            return AGAIN
        if stood := standing.describe(launched.attempt_directory(attempt), run.layout.world_size):
            print(stood, file=sys.stderr, flush=True)
        if machine.starter == "srun":
            print(failure_hints.describe(launched.outputs(attempt)), file=sys.stderr, flush=True)
        return exit_code or 1


def _state(run: RunSettings) -> Path | None:
    """The record of the state that a run goes on from. Raises UserError where it is missing."""
    if run.resume_from is None:
        return None
    record, writer = Path(run.resume_from) / "checkpoint.json", parse_run_id(run.resume_from)
    if not record.is_file():
        raise UserError(
            "the state that this run goes on from is missing.",
            path=record,
            next=f"rm -r results/runs/{writer}, and snakemake {done_file(writer)} trains it again"
            if writer
            else "name one that is there in resume_from",
        )
    return record


def _paths(files: list[str]) -> list[Path]:
    return [Path(file) for file in files]
