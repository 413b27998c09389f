"""Predict step times on more ranks from finished runs on few.

It needs the tables of an experiment whose runs scale weakly over two world sizes or more, such as
ddp_scaling_weak.
"""

import argparse
import json
from pathlib import Path

from tokenscale.base.errors import UserError

#: largest world size that can be asked for
LARGEST = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = "default: measured ones, 2 to 16 times the largest"
    nodes = "default: as in the runs' records, else 1"
    of_tables = "results/tables/EXPERIMENT: its runs of weak scaling"
    parser.add_argument("--tables", type=Path, metavar="DIR", help=of_tables)
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument("--world-sizes", type=_parse_world_sizes, metavar="N,N,…", help=sizes)
    parser.add_argument("--ranks-per-node", type=_parse_positive, metavar="N", help=nodes)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions. Raises UserError without tables of finished runs."""
    tables = arguments.tables
    if tables is None or not (tables / "runs.parquet").is_file():
        default = "ddp_scaling_weak"
        known = tables and Path(f"config/experiments/{tables.name}.yaml").is_file()
        name = tables.name if known else default
        there = (
            ", ".join(
                str(path.parent) for path in sorted(Path("results/tables").glob("*/runs.parquet"))
            )
            or None
        )
        what = (
            "a prediction needs finished runs at two world sizes or more, and their tables are "
            "not here."
        )
        # at scale demo, ranks share the cores
        scale = " --config scale=workstation" if name == default else ""
        following = f"snakemake {name}{scale}\ntokenscale predict --tables results/tables/{name}"
        raise UserError(what, tables=tables, found=there, next=following)
    from tokenscale.referee.projection import format_projection, project

    options = {"series": arguments.series, "world_sizes": arguments.world_sizes}
    found = project(tables, **options, ranks_per_node=arguments.ranks_per_node)
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
