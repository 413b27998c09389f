"""Judge the claims of a file against the tables of experiments: printed lines, `claims.json` and `claims.tex`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenscale.analysis import claims as judging
from tokenscale.analysis.replication import measure
from tokenscale.analysis.tables import read_experiment
from tokenscale.base.errors import UserError
from tokenscale.report import claims
from tokenscale.settings.claims_file import load_claims as read_ledger


def judge_and_print(
    ledger: Path, tables: Path, experiments: Sequence[str] | None, output: Path | None, strict: bool, **_: object
) -> int:
    """Judge the claims of a file, print a line for each, and write `claims.json` and `claims.tex` into `output`.

    Returns the exit code: 1 where `strict` is set and a claim that `holds_at` the scale does not hold, else 0.
    """
    known = read_ledger(ledger)
    if experiments is None:
        experiments = sorted(path.parent.name for path in tables.glob("*/experiment.json"))
    elif missing := [name for name in experiments if not (tables / name / "experiment.json").is_file()]:
        raise UserError(
            "there are no tables of this experiment.",
            experiment=", ".join(missing),
            folder=tables,
            next=f"snakemake results/tables/{missing[0]}/runs.parquet",
        )
    judged = judging.judge(known, tables, experiments)
    rows = judging.as_rows(known, judged)
    for line in claims.claim_lines(rows):
        print(line)
    print(", ".join(f"{n} {verdict}" for verdict, n in claims.count_verdicts(rows).items()))
    if output is not None:
        claims.write_claims(rows, output, measure(tables, experiments))
    scales = {read_experiment(tables / name).get("scale") for name in experiments}
    lost = judging.lost(known, judged, scales, experiments)
    for one in lost if strict else ():
        print(f"tokenscale: a sentence no longer holds: {one.id}.", file=sys.stderr)
        print(f"  verdict  {one.verdict}{f' ({one.reason})' if one.reason else ''}", file=sys.stderr)
        print(f"  says     {one.sentence}", file=sys.stderr)
        print(
            f"  next     look at its runs in the report, or take the scale out of holds_at in {ledger}", file=sys.stderr
        )
    return 1 if strict and lost else 0
