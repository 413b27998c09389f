"""Predict step times on more ranks with a model fitted to few, and back-test the model on published points."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for an experiment's tables, or for the back-test."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", type=Path, metavar="DIR", help="results/tables/EXPERIMENT: fit its own runs")
    what.add_argument(
        "--backtest", action="store_true", help="published points: fit the small sizes, predict the larger ones"
    )
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument(
        "--collectives", nargs="+", type=Path, default=[], metavar="FILE", help="results of `benchmark collectives`"
    )
    parser.add_argument("--sweep", action="store_true", help="with --backtest: the link from published all-reduces")
    parser.add_argument("--world-sizes", type=_parse_world_sizes, metavar="N,N,…", help="default 1, 2, 4, … 256")
    parser.add_argument(
        "--ranks-per-node", type=_parse_positive, metavar="N", help="default: as in the runs' records, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


#: options that belong to only one of the two modes
ONLY = {"backtest": ("sweep",), "tables": ("collectives", "world_sizes", "ranks_per_node")}


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions or the back-test. Raise UserError for an option that belongs to the other mode."""
    _check_options(arguments)
    if arguments.backtest:
        from tokenscale.analysis import published

        tested, skipped = published.run_backtest(arguments.series, sweep=arguments.sweep)
        if arguments.json:
            print(json.dumps(published.backtest_to_json(tested, skipped)))
        else:
            print(published.format_backtest(tested, skipped))
        return
    from tokenscale.analysis import projection

    found = projection.project(
        arguments.tables,
        series=arguments.series,
        collectives=arguments.collectives,
        world_sizes=arguments.world_sizes,
        ranks_per_node=arguments.ranks_per_node,
    )
    if arguments.json:
        print(json.dumps([projection.projection_to_json(one) for one in found]))
    else:
        print("\n\n".join(projection.format_projection(one) for one in found))


def _check_options(arguments: argparse.Namespace) -> None:
    requested = "backtest" if arguments.backtest else "tables"
    for mode, options in ONLY.items():
        for option in options:
            if mode != requested and getattr(arguments, option):
                from tokenscale.base.errors import UserError

                name = option.replace("_", "-")
                raise UserError(f"--{name} requires --{mode}.", found=f"--{requested}", next=f"remove --{name}")


def _parse_positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parse_world_sizes(text: str) -> list[int]:
    return sorted({_parse_positive(part) for part in text.split(",")})
