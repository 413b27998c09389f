"""Convert the logs of an experiment's runs to typed tables (Parquet)."""

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_experiment = "run table: results/experiments/<name>/runs.json"
    of_stores = "manifests of token stores"
    parser.add_argument("--experiment", required=True, type=Path, help=of_experiment)
    parser.add_argument(
        "--runs", type=Path, default=Path("results/runs"), help="folder of the runs' folders"
    )
    files = {
        "benchmark": "data benchmark files (JSON)",
        "certificate": "parity certificates",
        "store": of_stores,
    }
    for name, text in (files | {"corpus": "manifests of their corpora"}).items():
        several: dict[str, Any] = {
            "nargs": "*",
            "type": Path,
            "default": [],
            "action": "extend",
            "metavar": "FILE",
        }
        parser.add_argument(f"--{name}", **several, help=text)
    parser.add_argument(
        "--output", required=True, type=Path, help="folder of the tables: results/tables/<name>"
    )
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FOLDER",
        help="tables of single runs, of which only new and changed runs are read again",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads that read logs (default 2)")


def run(arguments: argparse.Namespace) -> int:
    """Ingest the logs and report the number of rows of each table."""
    from tokenscale.analysis.ingest import ingest

    inputs = {
        "stores": arguments.store,
        "corpora": arguments.corpus,
        "certificates": arguments.certificate,
    }
    paths = arguments.experiment, arguments.runs, arguments.output, arguments.benchmark
    counts = ingest(*paths, **inputs, kept=arguments.kept, threads=max(arguments.threads, 1))
    print(f"{arguments.output}: " + ", ".join(f"{n} {table}" for table, n in counts.items()))
    return 0
