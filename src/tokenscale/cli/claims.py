"""Test the claims against the experiments' tables: their numbers and verdicts."""

import argparse
from pathlib import Path

from tokenscale.cli import configuration
from tokenscale.report.judge_claims import judge_and_print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the claims and the tables."""
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help="the claims; by default the file that the configuration names"
    )
    configuration.add_arguments(parser)
    parser.add_argument(
        "--tables",
        type=Path,
        default=Path("results/tables"),
        metavar="FOLDER",
        help="folder of the experiments' tables",
    )
    parser.add_argument(
        "--experiments",
        nargs="*",
        metavar="NAME",
        help="experiments whose tables are queried (default: all existing ones)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write claims.json and claims.tex there")
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 if a required claim (holds_at) does not hold"
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims, print them, and write the files that were requested."""
    if arguments.ledger is None:
        arguments.ledger = Path(configuration.load_configuration(arguments).settings.claims)
    return judge_and_print(**vars(arguments))
