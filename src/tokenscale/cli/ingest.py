"""Logs of an experiment's runs → typed tables (Parquet). Reads only what has changed."""

import argparse
import shutil
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
    for name, what in (("store", "token stores"), ("corpus", "the corpora that they are of")):
        parser.add_argument(
            f"--{name}", nargs="*", type=Path, default=[], action="extend", metavar="FILE", help=f"manifests of {what}"
        )
    parser.add_argument("--output", required=True, type=Path, help="folder of the tables: results/tables/<name>")
    parser.add_argument("--afresh", action="store_true", help="read every log, also those that have not changed")
    parser.add_argument("--threads", type=int, default=2, help="threads that read logs (default 2)")


def run(arguments: argparse.Namespace) -> int:
    """Ingest and say how much."""
    from tokenscale.analysis.ingest import ingest

    # beside the tables: whoever makes them anew may delete their folder first
    kept = arguments.output.parent / f".{arguments.output.name}.kept"
    if arguments.afresh:
        shutil.rmtree(kept, ignore_errors=True)
    counts = ingest(
        arguments.experiment,
        arguments.runs,
        arguments.output,
        arguments.benchmark,
        stores=arguments.store,
        corpora=arguments.corpus,
        kept=kept,
        threads=max(arguments.threads, 1),
    )
    print(f"{arguments.output}: " + ", ".join(f"{n} {table}" for table, n in counts.items()))
    return 0
