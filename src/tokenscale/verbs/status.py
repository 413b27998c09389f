"""How things stand: what is stale, and why."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option says what is asked."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--stale",
        nargs="*",
        metavar="TARGET",
        help="what would rerun and why: of these targets, files or experiments; by default of the report",
    )
    parser.add_argument("--profile", metavar="FOLDER", help="Snakemake's profile, as in `snakemake --profile FOLDER`")


def run(arguments: argparse.Namespace) -> None:
    """Print the answer."""
    from tokenscale.diagnosis import stale

    print(stale.stale(arguments.stale, arguments.profile))
