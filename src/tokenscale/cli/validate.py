"""Judge an experiment's runs from its tables: validity, reasons and cautions."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_experiment = "run table: results/experiments/<name>/runs.json"
    parser.add_argument("--experiment", required=True, type=Path, help=of_experiment)
    parser.add_argument(
        "--tables", required=True, type=Path, help="folder of the tables: results/tables/<name>"
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs' folders, for runs that the table lacks"
    )
    for name, text in (
        ("store", "manifests of token stores"),
        ("corpus", "manifests of their corpora"),
    ):
        several: dict[str, Any] = {
            "nargs": "*",
            "type": Path,
            "default": [],
            "action": "extend",
            "metavar": "FILE",
        }
        parser.add_argument(f"--{name}", **several, help=text)
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FOLDER",
        help="findings of earlier calls; only new and changed runs are judged again",
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge the runs, and print the findings."""
    from tokenscale.referee.validity import judge_tables

    rows = judge_tables(
        arguments.tables,
        experiment=arguments.experiment,
        runs=arguments.runs,
        stores=arguments.store,
        corpora=arguments.corpus,
        kept=arguments.kept,
    )
    print(f"{arguments.tables}: {len(rows)} runs judged")
    _print_findings(rows)
    return 0


def _print_findings(rows: Iterable[dict[str, Any]]) -> None:
    """Print each sentence once, with the runs that it is said of."""
    said: dict[tuple[str, str], list[str]] = {}
    unchecked = 0
    for row in rows:
        unchecked += bool(row.get("unchecked"))
        texts = {row["validity"]: row.get("reasons"), "caution": row.get("cautions")}
        for word, sentences in texts.items():
            for sentence in filter(None, (sentences or "").split("; ")):
                said.setdefault((word, sentence), []).append(row["run_id"])
    for (word, sentence), ids in said.items():
        print(f"  {word}  {ids[0] if len(ids) == 1 else f'{len(ids)} runs'}: {sentence}")
    if unchecked:
        print(
            f"  not checked  some values of {unchecked} runs: column `unchecked` of the table "
            "validity"
        )
