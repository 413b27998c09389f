"""Do the sentences of the ledger hold? Their numbers and verdicts, from the tables of experiments."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenscale.analysis import claims
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.cli import configuration
from tokenscale.report import claims as words
from tokenscale.settings.claims import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which ledger, and whose tables."""
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help="the claims; by default the file that the configuration names"
    )
    configuration.add_arguments(parser)
    parser.add_argument(
        "--tables",
        type=Path,
        default=Path("results/tables"),
        metavar="FOLDER",
        help="folder of the experiments' tables",
    )
    parser.add_argument(
        "--experiments", nargs="*", metavar="NAME", help="whose tables are asked; by default all that are there"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write claims.json and claims.tex there")
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where a sentence that is relied on (holds_at) does not hold"
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge, print, and write where asked to."""

    if arguments.ledger is None:
        arguments.ledger = Path(configuration.configuration(arguments).settings.claims)
    return judge_and_print(**vars(arguments))


def judge_and_print(
    ledger: Path, tables: Path, experiments: Sequence[str] | None, output: Path | None, strict: bool, **_: object
) -> int:
    """Exit code: 1 where `strict` and a sentence that is relied on at its scale does not hold."""
    known = read(ledger)
    if experiments is None:
        experiments = sorted(path.parent.name for path in tables.glob("*/experiment.json"))
    elif missing := [name for name in experiments if not (tables / name / "experiment.json").is_file()]:
        raise UserError(
            "there are no tables of this experiment.",
            experiment=", ".join(missing),
            folder=tables,
            next=f"snakemake results/tables/{missing[0]}/runs.parquet",
        )
    judged = claims.judge(known, tables, experiments)
    rows = claims.as_rows(known, judged)
    for line in words.lines(rows):
        print(line)
    print(", ".join(f"{n} {verdict}" for verdict, n in words.counts(rows).items()))
    if output is not None:
        words.write(rows, output)
    scales = {
        read_json(tables / name / "experiment.json", "experiment's description").get("scale") for name in experiments
    }
    lost = claims.lost(known, judged, scales)
    for one in lost if strict else ():
        print(f"tokenscale: a sentence no longer holds: {one.id}.", file=sys.stderr)
        print(f"  verdict  {one.verdict}{f' ({one.reason})' if one.reason else ''}", file=sys.stderr)
        print(f"  says     {one.sentence}", file=sys.stderr)
        print(
            f"  next     look at its runs in the report, or take the scale out of holds_at in {ledger}", file=sys.stderr
        )
    return 1 if strict and lost else 0
