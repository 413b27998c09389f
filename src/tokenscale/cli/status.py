"""Status of the queue's jobs and of the runs, with reasons and progress; files that are missing, failed or stale."""

import argparse
from pathlib import Path

from tokenscale.cli import configuration

#: a folder with one of these is a project's, or holds a copy of its results
PROJECT = ("workflow/Snakefile", "results", ".snakemake")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option says what is asked; without one: the queue and the runs."""
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--stale",
        nargs="*",
        metavar="TARGET",
        help="what would rerun and why: of these targets, files or experiments; by default of the report",
    )
    asked.add_argument(
        "--failed",
        nargs="?",
        const="",
        metavar="LOG",
        help="what failed and why, by a log of Snakemake's; by default that of its last call in this folder",
    )
    asked.add_argument(
        "--missing",
        action="store_true",
        help="files of the report that have been deleted, one a line, as targets for Snakemake",
    )
    asked.add_argument(
        "--watch",
        nargs="?",
        const=5.0,
        type=_seconds,
        metavar="SECONDS",
        help="the queue and the runs again and again, every 5 seconds if not told otherwise, until Ctrl-C",
    )
    configuration.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the queue and the runs as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the answer. Raises UserError where JSON is asked for of what has none, and outside of a project."""
    if not any(Path(name).exists() for name in PROJECT):
        from tokenscale.base.errors import UserError

        raise UserError(
            "this folder holds no project.",
            folder=Path.cwd(),
            expected="workflow/Snakefile, or results/",
            next="cd to the project's folder, and give the command again",
        )
    others = (arguments.stale, arguments.failed, arguments.watch, arguments.missing or None)
    if arguments.json and any(asked is not None for asked in others):
        from tokenscale.base.errors import UserError

        raise UserError("--json is of the queue and the runs, once.", next="python -m tokenscale status --json")
    if arguments.stale is not None:
        from tokenscale.cli import status_stale as stale
        from tokenscale.settings import calls
        from tokenscale.settings.calls import PLAIN

        call = configuration.call_of(arguments)
        if call == PLAIN and (last := calls.last() or PLAIN) != PLAIN:
            call = last
            print(f"configuration of the last call here: {' '.join(['snakemake', *call.arguments])}\n")
        print(stale.stale(arguments.stale, call))
    elif arguments.failed is not None:
        from tokenscale.cli import status_failed as failed

        if text := failed.failed(Path(arguments.failed) if arguments.failed else None):
            print(text)
    elif arguments.missing:
        from tokenscale.cli import status_missing as missing

        for file in missing.missing().files:
            print(file)
    elif arguments.watch is not None:
        from tokenscale.cli import status_overview as overview

        overview.watch(arguments.watch)
    else:
        from tokenscale.cli import status_overview as overview

        found = overview.overview()
        print(found.to_json() if arguments.json else found.render(overview.terminal_width()))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 86400")
    return seconds
