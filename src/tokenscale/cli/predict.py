"""Predict step times on more ranks from runs on few."""

import argparse
import json
from pathlib import Path

#: largest world size that can be asked for
LARGEST = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the fit and of the prediction."""
    parser.add_argument(
        "--tables", required=True, type=Path, metavar="DIR", help="results/tables/EXPERIMENT: its runs of weak scaling"
    )
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument(
        "--world-sizes",
        type=_parse_world_sizes,
        metavar="N,N,…",
        help="default: measured ones, 2 to 16 times the largest",
    )
    parser.add_argument(
        "--ranks-per-node", type=_parse_positive, metavar="N", help="default: as in the runs' records, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions."""
    from tokenscale.analysis.projection import format_projection, project

    found = project(
        arguments.tables,
        series=arguments.series,
        world_sizes=arguments.world_sizes,
        ranks_per_node=arguments.ranks_per_node,
    )
    if arguments.json:
        print(json.dumps([projection.to_json() for projection in found]))
    else:
        print("\n\n".join(map(format_projection, found)))


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST}")
    return int(text)


def _parse_world_sizes(text: str) -> list[int]:
    return sorted({_parse_positive(part) for part in text.split(",")})
