"""The judged claims as the report shows them: a table, LaTeX macros, and words for a terminal."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json, write_text
from tokenscale.referee import replication
from tokenscale.referee.claims import SUPPORTED, VERDICTS, format_number
from tokenscale.report.table import Table, columns, in_latex

#: words for a supported claim whose number is not the published figure, or may be another one
DIRECTION = "direction supported"
NOT_REPRODUCED = "figure not reproduced"
UNDECIDED = "figure not decided"
#: LaTeX names have letters only
_DIGITS = dict(
    zip(
        "0123456789",
        ["Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine"],
        strict=True,
    )
)


def read_claims(path: Path) -> list[dict[str, Any]]:
    """The judged claims as the verb `claims` wrote them."""
    return read_json(path, what="judged claims", next=f"snakemake {path}")["claims"]


def write_claims(
    claims: list[dict[str, Any]], output: Path, measured: Sequence[dict[str, Any]] = ()
) -> None:
    """Write `claims.json` and `claims.tex` into a folder; `measured` are our numbers beside the
    figures of the studies.

    Raises UserError where two claims have one macro.
    """
    latex = macros(claims)
    write_json(
        output / "claims.json", value={"schema": 1, "claims": claims, "replication": list(measured)}
    )
    write_text(output / "claims.tex", text=latex)


def read_replication(path: Path) -> list[replication.Row]:
    """The source studies' figures beside ours, from the judged claims."""
    judged = read_json(path, what="judged claims", next=f"snakemake {path}")
    return replication.compare_with_studies(judged["claims"], measured=judged["replication"])


def replication_tables(rows: Iterable[replication.Row]) -> list[tuple[str, str, Table]]:
    """(study, how many figures have which verdict, table of all of them) of each study; what was
    run comes first.
    """
    heads = columns("table, cell", "verdict", "published", "ours", "ratio", "corrected (why)")
    rows = list(rows)
    found = []
    for study in dict.fromkeys(row.study for row in rows):
        of = sorted(
            (row for row in rows if row.study == study),
            key=lambda row: row.verdict in replication.WITHOUT_NUMBER,
        )
        verdicts = Counter(row.verdict for row in of)
        counts = ", ".join(
            f"{verdicts[word]} {word}" for word in replication.VERDICTS if verdicts[word]
        )
        texts = []
        for row in of:
            cell, published, corrected, ours, ratio, verdict = row.texts
            texts.append([f"{row.table}: {cell}", verdict, published, ours, ratio, corrected])
        found.append((study, f"{len(texts)} figures: {counts}", Table(heads, rows=texts)))
    return found


def count_verdicts(claims: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Verdict → how many claims have it."""
    found = Counter(claim["verdict"] for claim in claims)
    return {verdict: found[verdict] for verdict in VERDICTS}


def claims_table(claims: Iterable[dict[str, Any]], document: str) -> Table:
    """A row a claim of one document, as paper has room for it."""
    rows = []
    for claim in claims:
        if claim["document"] != document:
            continue
        sentences = [claim["sentence"], describe_reason(claim)]
        if claim["experiment"]:
            sentences.append(f"Holds {_rule(claim)}.")
        sentences += [claim["remark"], claim["refused"]]
        if claim["experiment"]:
            place = ", ".join(filter(None, [claim["experiment"], claim["shown_in"]]))
            sentences.append(f"From {place}.")
        text = " ".join(filter(None, sentences))
        rows.append([claim["claim"], claim["figure"] or "–", text, ", ".join(verdict_words(claim))])
    return Table(columns("claim", "its figure", "what the data say", "verdict"), rows)


def describe_verdict(claim: dict[str, Any]) -> dict[str, Any]:
    """Words for a page: its verdict in words and why, where it would hold, its p, and the verdict's
    first word.
    """
    found = {
        "words": verdict_words(claim),
        "because": describe_reason(claim),
        "rule": _rule(claim),
        "p": _p(claim),
    }
    return found | {"state": claim["verdict"].split()[0]}


def verdict_words(claim: dict[str, Any]) -> list[str]:
    """The verdict, and beside it whether a supported claim's published figure is reproduced.

    >>> verdict_words({"verdict": "supported", "published": [2.0], "reproduced": False})
    ['direction supported', 'figure not reproduced']
    """
    if claim["verdict"] == SUPPORTED and claim["published"] and not claim["reproduced"]:
        return [DIRECTION, UNDECIDED if claim["reproduced"] is None else NOT_REPRODUCED]
    return [claim["verdict"]]


def _rule(claim: dict[str, Any]) -> str:
    """
    >>> _rule({"direction": "equal", "bound": 1.0, "margin": 0.01, "unit": "ratio"})
    'within 1.00 % of 1.00'
    """
    bound = format_number(claim["bound"], unit=claim["unit"])
    margin = format_number(claim["margin"], unit="percent")
    if claim["direction"] == "equal":
        return f"within {margin} of {bound}"
    return f"{claim['direction']} {bound}" + (f", by more than {margin}" if claim["margin"] else "")


def describe_reason(claim: dict[str, Any]) -> str:
    """The reason of a verdict as a sentence; empty if there is none."""
    reason = claim["reason"]
    return f"{reason[:1].upper()}{reason[1:]}." if reason else ""


def _p(claim: dict[str, Any]) -> str:
    """The p-values that decided: of each cell alone where all support the claim, else after Holm;
    `–` for counts.
    """
    alone = claim["verdict"] == SUPPORTED and claim["in_cells"] == "all"
    ps = [cell["p" if alone else "corrected_p"] for cell in claim["cells"]]
    if not ps or all(p == 0 for p in ps):
        return "–"
    return " to ".join(dict.fromkeys(f"{p:.2g}" for p in (min(ps), max(ps)))) + (
        " in each cell" if len(ps) > 1 else ""
    )


def macros(claims: Iterable[dict[str, Any]]) -> str:
    """LaTeX: `\\claimIsolatedSpeedUp` is the sentence; …Number, …Low, …High, …N and …Verdict are
    its parts.

    Raises UserError where two claims would define one macro.
    """
    lines = ["% Numbers and verdicts of the claims ledger. Made by: tokenscale claims"]
    lines += ["% A claim that is not tested has a verdict, and dashes for numbers."]
    taken: dict[str, str] = {}
    for claim in claims:
        parts = {
            part.capitalize(): format_number(claim[part], unit=claim["unit"])
            for part in ("number", "low", "high")
        }
        parts = {
            "": claim["sentence"],
            **parts,
            "N": str(claim["n"]),
            "Verdict": ", ".join(verdict_words(claim)),
        }
        for macro, text in (
            (f"\\claim{_macro(claim['id'])}{part}", text) for part, text in parts.items()
        ):
            if macro in taken:  # `a-1` and `a-one`, or `a` and `a-low`
                what = "two claims have one LaTeX macro."
                next_step = "rename one of them: a macro spells out digits"
                raise UserError(
                    what, macro=macro, claims=f"{taken[macro]}, {claim['id']}", next=next_step
                )
            taken[macro] = claim["id"]
            lines.append(f"\\newcommand{{{macro}}}{{{in_latex(text)}}}")
    return "\n".join(lines) + "\n"


def _macro(name: str) -> str:
    """
    >>> _macro("ddp-94")
    'DdpNineFour'
    """
    words = "".join(word.capitalize() for word in name.split("-"))
    return re.sub(r"\d", lambda digit: _DIGITS[digit[0]], words)


def claim_lines(claims: Iterable[dict[str, Any]]) -> list[str]:
    """A line a claim, for a terminal."""
    rows = [
        (", ".join(verdict_words(c)), c["id"], f"{c['sentence']} {describe_reason(c)}".strip())
        for c in claims
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [f"{verdict:<{widths[0]}}  {name:<{widths[1]}}  {text}" for verdict, name, text in rows]
