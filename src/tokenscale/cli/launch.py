"""Start a run's processes here or in a SLURM job, wait for them, and write done.json from the sealed record."""

import argparse
from pathlib import Path

from tokenscale.cli import configuration

ROLES = ("corpus", "tokenizer", "store", "validation_store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run by its id, as `plan` lists them; or everything by hand, as the rule does it."""
    parser.usage = (
        "%(prog)s RUN_ID … [--profile alps] [--print | --sbatch FILE]\n"
        "       %(prog)s --run JSON --output FILE [--site FILE] [--store FILE …] [--print]"
    )
    parser.add_argument(
        "run_id",
        nargs="*",
        metavar="RUN_ID",
        help="a run of an experiment; with --sbatch several of one rank: one node",
    )
    configuration.add_arguments(parser)
    parser.add_argument("--print", action="store_true", help="print the command of its processes, and start nothing")
    parser.add_argument("--sbatch", type=Path, metavar="FILE", help="write a job script for sbatch, and start nothing")
    parser.add_argument("--run", help="the run's settings as canonical JSON, instead of its id")
    parser.add_argument("--output", type=Path, help="results/runs/<run id>/done.json")
    for role in ROLES:
        option, text = f"--{role.replace('_', '-')}", f"manifest of the {role.replace('_', ' ')}"
        parser.add_argument(option, type=Path, nargs="?", help=text)
    parser.add_argument(
        "--site", nargs="?", help="file of the machine (config/README.md); by default this one as it is"
    )
    parser.add_argument("--share", type=int, default=1, help="runs that have this run's nodes at the same time")


def run(arguments: argparse.Namespace) -> int:
    """Hand over to `launch.request`."""
    from tokenscale.base.errors import UserError
    from tokenscale.cli import launch_command as request

    if arguments.run is None:
        from tokenscale.cli.plan_prices import Priced

        settings = configuration.configuration(arguments)
        requests = request.named(arguments.run_id, arguments.profile, settings, Priced(settings).minutes)
    else:
        manifests = {role: path for role in ROLES if (path := getattr(arguments, role)) is not None}
        requests = [request.stated(arguments.run, arguments.output, arguments.site, manifests)]
    if arguments.sbatch is not None:
        print(request.written(requests, arguments.sbatch))
        return 0
    if len(requests) > 1:
        raise UserError("one run is launched at a time.", found=len(requests), next="--sbatch FILE for one shared node")
    if arguments.print:
        print(request.printed(requests[0], arguments.share))
        return 0
    return request.start(requests[0], arguments.share)
