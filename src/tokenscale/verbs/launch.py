"""Start a run's processes on this machine, wait for them, and write done.json from the sealed record."""

import argparse
from pathlib import Path

ROLES = ("corpus", "tokenizer", "store", "validation_store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths are those of manifests, as the rule names them."""
    parser.add_argument("--run", required=True, help="the run's settings as canonical JSON")
    parser.add_argument("--output", required=True, type=Path, help="results/runs/<run id>/done.json")
    for role in ROLES:
        option, text = f"--{role.replace('_', '-')}", f"manifest of the {role.replace('_', ' ')}"
        parser.add_argument(option, type=Path, nargs="?", help=text)
    parser.add_argument(
        "--site", nargs="?", help="file of the machine (config/README.md); by default this one as it is"
    )
    parser.add_argument("--share", type=int, default=1, help="runs that have this run's nodes at the same time")


def run(arguments: argparse.Namespace) -> int:
    """Hand over to `launch.start`."""
    from tokenscale.launch.start import start
    from tokenscale.settings import machine
    from tokenscale.settings.run import RunSettings

    manifests = {role: path for role in ROLES if (path := getattr(arguments, role)) is not None}
    settings = RunSettings.from_json(arguments.run)
    where = machine.load(arguments.site)
    return start(settings, arguments.output, manifests, machine=where, share=arguments.share, wait=True)
