"""Do the sentences of the ledger hold? Their numbers and verdicts, from the tables of experiments."""

import argparse
from pathlib import Path

from tokenscale.cli import configuration
from tokenscale.report.judge_claims import judge_and_print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which ledger, and whose tables."""
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
        "--experiments", nargs="*", metavar="NAME", help="whose tables are asked; by default all that are there"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write claims.json and claims.tex there")
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where a sentence that is relied on (holds_at) does not hold"
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims, print them, and write the files that were requested."""
    if arguments.ledger is None:
        arguments.ledger = Path(configuration.configuration(arguments).settings.claims)
    return judge_and_print(**vars(arguments))
