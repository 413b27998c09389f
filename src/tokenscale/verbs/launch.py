"""Start a run's processes on this machine, wait for them, and write done.json from the sealed record."""

import argparse
import sys
from pathlib import Path

ROLES = ("corpus", "tokenizer", "store", "validation_store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths are those of manifests, as the rule names them."""
    parser.add_argument("--run", required=True, help="the run's settings as canonical JSON")
    parser.add_argument("--output", required=True, type=Path, help="results/runs/<run id>/done.json")
    for role in ROLES:
        parser.add_argument(
            f"--{role.replace('_', '-')}", type=Path, nargs="?", help=f"manifest of the {role.replace('_', ' ')}"
        )
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job that this runs in")
    parser.add_argument("--code", type=Path, nargs="*", help="source files of the training; found by default")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the attempt, run the ranks, finish."""
    from tokenscale.errors import UserError
    from tokenscale.files import locked
    from tokenscale.launch.attempts import identity_of
    from tokenscale.settings.closure import training_code
    from tokenscale.settings.run import RunSettings

    settings = RunSettings.from_json(arguments.run)
    if arguments.nodes > 1:
        raise UserError(
            "a run over several nodes cannot be started yet.",
            run=f"{settings.identity} needs {arguments.nodes} nodes",
            next="use layouts that fit one node",
        )
    directory = arguments.output.parent
    manifests = {role: path for role in ROLES if (path := getattr(arguments, role)) is not None}
    identity = identity_of(arguments.code or [Path(f) for f in training_code(settings)], manifests)
    with locked(directory, settings.identity):
        return _launch(arguments, settings, manifests, identity)


def _launch(arguments, settings, manifests, identity) -> int:
    from tokenscale.launch.attempts import finish, prepare
    from tokenscale.launch.ranks import run_ranks

    directory = arguments.output.parent
    attempt = prepare(directory, settings, identity)
    if attempt is None:
        print(f"{settings.identity} has ended already, with this code and data; remove {directory} to train it again")
        finish(directory, arguments.output, identity, settings)
        return 0
    argv = [sys.executable, "-m", "tokenscale", "train", "--run", arguments.run, "--directory", str(directory)]
    argv += ["--attempt", str(attempt)]
    for role, path in manifests.items():
        argv += [f"--{role.replace('_', '-')}", str(path)]
    code = run_ranks(argv, settings.layout.world_size)
    if finish(directory, arguments.output, identity, settings):
        if code:
            print(
                f"tokenscale: {settings.identity} is sealed; its processes ended with code {code} after that.",
                file=sys.stderr,
            )
        return 0
    return code or 1
