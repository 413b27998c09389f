"""Predict step times on more ranks with a model fitted to few."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the fit and of the prediction."""
    parser.add_argument(
        "--tables", required=True, type=Path, metavar="DIR", help="results/tables/EXPERIMENT: fit its own runs"
    )
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument(
        "--collectives", nargs="+", type=Path, default=[], metavar="FILE", help="results of `benchmark collectives`"
    )
    parser.add_argument("--world-sizes", type=_parse_world_sizes, metavar="N,N,…", help="default 1, 2, 4, … 256")
    parser.add_argument(
        "--ranks-per-node", type=_parse_positive, metavar="N", help="default: as in the runs' records, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions."""
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


def _parse_positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parse_world_sizes(text: str) -> list[int]:
    return sorted({_parse_positive(part) for part in text.split(",")})
