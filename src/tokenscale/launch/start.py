"""One run from its settings to `done.json`: make room, start the ranks, seal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenscale.errors import UserError
from tokenscale.files import locked
from tokenscale.launch.attempts import Identity, drop_states, finish, identity_of, prepare
from tokenscale.launch.ranks import run_ranks
from tokenscale.settings.closure import layout_code, training_code
from tokenscale.settings.run import RunSettings


@contextmanager
def opened(run: RunSettings, output: Path, manifests: dict[str, Path]) -> Iterator[tuple[Identity, int | None]]:
    """Hold the folder of `output` for a run: (its identity, the number of the attempt to make).

    The number is None where the run is sealed there with this identity; `output` is then there, too. Raises UserError
    for a missing manifest and for a folder that another process writes.
    """
    for role, path in manifests.items():
        if not path.is_file():
            raise UserError(
                f"the manifest of the {role.replace('_', ' ')} is missing.", path=path, next=f"snakemake {path}"
            )
    identity = identity_of(_paths(training_code(run)), manifests, _paths(layout_code(run)))
    directory = output.parent
    with locked(directory, run.identity):
        attempt = prepare(directory, run, identity)
        if attempt is None:
            print(f"{run.identity} has ended already, with this code and data; remove {directory} to train it again")
            finish(directory, output, identity, run)
            drop_states(directory, run)
        yield identity, attempt


def start(run: RunSettings, output: Path, manifests: dict[str, Path], *, share: int = 1) -> int:
    """Train the run in `output`'s folder unless it is sealed there already; write `output`. Returns the exit code.

    `manifests` are the run's inputs by role (corpus, tokenizer, store, validation_store). Raises UserError as `opened`
    does, and for several nodes, which are not started yet.
    """
    directory = output.parent
    with opened(run, output, manifests) as (identity, attempt):
        if attempt is None:
            return 0
        argv = [sys.executable, "-m", "tokenscale", "rank", "--run", run.to_json(), "--directory", str(directory)]
        argv += ["--attempt", str(attempt)]
        for role, path in manifests.items():
            argv += [f"--{role.replace('_', '-')}", str(path)]
        exit_code = run_ranks(argv, run.layout.world_size)
        if not finish(directory, output, identity, run):
            return exit_code or 1
        if exit_code:  # what counts was on disk before the processes were torn down
            print(f"tokenscale: {run.identity} is sealed; its processes then ended with {exit_code}.", file=sys.stderr)
        return 0


def _paths(files: list[str]) -> list[Path]:
    return [Path(file) for file in files]
