"""Judged claims against what the ledger and the tables at hand make of them: a verdict is not taken as it lies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenscale.analysis import claims
from tokenscale.base.errors import UserError
from tokenscale.report import claims as judged
from tokenscale.report.verification_findings import CODE, DATA, FOREIGN, SHOWN, Finding, few

FILE = "claims.json"
#: keys of a judged claim that the ledger states; all others follow from the tables
STATED = ("document", "where", "claim", "figure", "unit", "direction", "bound", "margin", "remark", "sql_sha256")


def judge(ledger: Path, tables: Path, experiments: Sequence[str], output: Path) -> Path:
    """Judge the ledger's claims again; returns the path of `claims.json` in the folder `output`, with its LaTeX beside.

    Raises UserError where there is no ledger: without one a forged verdict could not be told.
    """
    from tokenscale.settings.claims_file import read  # takes pydantic

    if not ledger.is_file():
        raise UserError("there is no ledger to judge the claims by.", file=ledger, next="--ledger FILE names it")
    known = read(ledger)
    judged.write(claims.as_rows(known, claims.judge(known, tables, experiments)), output)
    return output / FILE


def compare(finding: Finding, then: Path, now: Path) -> None:
    """Name the claims of the file `then` that are others in `now`.

    Where data or code have changed, which `finding` says already, so have verdicts; else somebody has edited them.
    """
    try:
        rows = {row["id"]: row for row in judged.read(then)}
    except (UserError, KeyError, TypeError):
        finding.add(FOREIGN, f"{then.name} is not one that tokenscale writes")
        return
    found = {row["id"]: row for row in judged.read(now)}
    both = [name for name in found if name in rows]
    restated = [name for name in both if any(rows[name].get(key) != found[name][key] for key in STATED)]
    for change, names in (
        ("the ledger has no such claims", [name for name in rows if name not in found]),
        ("the ledger has further claims", [name for name in found if name not in rows]),
        ("the ledger states these claims otherwise", restated),
    ):
        if names:
            finding.add(CODE, f"{then.name}: {change}: {few(names)}")
    others = [name for name in both if name not in restated and rows[name] != found[name]]
    verdict = next((known for known in (DATA, CODE) if known in finding.verdicts), FOREIGN)
    sentences = [f"{then.name}: {name} {_difference(rows[name], found[name])}" for name in others[:SHOWN]]
    if len(others) > SHOWN:
        sentences.append(f"{then.name}: {len(others) - SHOWN} further claims are others")
    if sentences:
        finding.add(verdict, *sentences)


def _difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that differs, the verdict before all else."""
    keys = ["verdict", *now, *then]
    key = next(key for key in keys if then.get(key) != now.get(key))
    return f"has {key} {then.get(key)!r}; judged again, {now.get(key)!r}"
