"""What this machine can run, what it cannot, and why. Exit code 0 when the demo can run here, else 2."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the results")
    parser.add_argument("--network", action="store_true", help="also try to reach the hub of tokenizers and texts")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print."""
    from tokenscale.cli.doctor_command import examine

    examination = examine(arguments.results, network=arguments.network)
    print(examination.to_json() if arguments.json else examination.render())
    return 0 if examination.demo.possible else 2
