"""Test the claims against the experiments' tables: their numbers and verdicts."""

import argparse
import sys
from pathlib import Path

from tokenscale.analysis.tables import read_experiment
from tokenscale.base.errors import UserError, unknown
from tokenscale.cli import main
from tokenscale.referee import claims as judging
from tokenscale.referee.replication import measure_figures
from tokenscale.report import claims
from tokenscale.settings.claims import load_claims as read_ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="the claims; by default the file that the configuration names",
    )
    main.add_configuration_arguments(parser)
    of_tables = "folder of the experiments' tables"
    add("--tables", type=Path, default=Path("results/tables"), metavar="FOLDER", help=of_tables)
    of_experiments = "experiments whose tables are queried (default: all existing ones)"
    add("--experiments", nargs="*", metavar="NAME", help=of_experiments)
    add("--output", type=Path, metavar="FOLDER", help="write claims.json and claims.tex there")
    add(
        "--strict",
        action="store_true",
        help="exit code 1 if a required claim (holds_at) does not hold",
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims, print a line for each, and write `claims.json` and `claims.tex` if there is
    an output folder.

    Returns the exit code: 1 with `--strict` if a claim that `holds_at` the scale does not hold,
    else 0.
    """
    tables = arguments.tables
    experiments = arguments.experiments
    ledger = arguments.ledger or Path(main.load_configuration(arguments).settings.claims)
    known = read_ledger(ledger)
    if experiments is None:
        experiments = sorted(path.parent.name for path in tables.glob("*/experiment.json"))
    elif missing := [
        name for name in experiments if not (tables / name / "experiment.json").is_file()
    ]:
        names = [path.stem for path in Path("config/experiments").glob("*.yaml")]
        if names and missing[0] not in names:
            raise unknown("experiment", word=missing[0], words=names)
        what = "there are no tables of this experiment."
        next_step = f"snakemake results/tables/{missing[0]}/validity.parquet"
        raise UserError(what, experiment=", ".join(missing), folder=tables, next=next_step)
    judged = judging.judge_claims(known, tables, experiments)
    rows = judging.list_verdicts(known, judged)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in claims.count_verdicts(rows).items())
    print(*claims.claim_lines(rows), counts, sep="\n")
    if arguments.output is not None:
        claims.write_claims(
            rows, arguments.output, measured=measure_figures(known, tables, experiments)
        )
    scales = {read_experiment(tables / name).get("scale") for name in experiments}
    lost = judging.find_lost_claims(
        known,
        judged,
        scales,
        experiments=experiments,
    )
    next_step = f"look at its runs in the report, or take the scale out of holds_at in {ledger}"
    for one in lost if arguments.strict else ():
        verdict = f"{one.verdict}{f' ({one.reason})' if one.reason else ''}"
        found = UserError(
            f"a sentence no longer holds: {one.id}.",
            verdict=verdict,
            says=one.sentence,
            next=next_step,
        )
        print(found, file=sys.stderr)
    return 1 if arguments.strict and lost else 0
