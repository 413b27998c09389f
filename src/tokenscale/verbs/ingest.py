"""Logs of an experiment's runs, and benchmark files → typed tables (Parquet)."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths in, folder out."""
    parser.add_argument(
        "--experiment", required=True, type=Path, help="run table: results/experiments/<name>/runs.json"
    )
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the runs' folders")
    parser.add_argument(
        "--benchmark", nargs="*", type=Path, default=[], action="extend", help="data benchmark files (JSON)"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the tables: results/tables/<name>")


def run(arguments: argparse.Namespace) -> int:
    """Ingest and say how much."""
    from tokenscale.analysis.ingest import ingest

    counts = ingest(arguments.experiment, arguments.runs, arguments.output, arguments.benchmark)
    print(f"{arguments.output}: " + ", ".join(f"{n} {table}" for table, n in counts.items()))
    return 0
