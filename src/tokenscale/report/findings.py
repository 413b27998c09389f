"""The findings of a README, written from the evidence that is kept beside it."""

from pathlib import Path
from typing import Any

from tokenscale.analysis.claims import SUPPORTED
from tokenscale.analysis.replication import replicate
from tokenscale.base.files import read_json, write_text
from tokenscale.report.claims import describe_reason, read_claims, replication_tables, verdict_words
from tokenscale.report.table import Table, markdown

BEGIN, END = "<!-- findings: python -m tokenscale check --write -->", "<!-- end of findings -->"


def text(evidence: Path) -> str:
    """A row for each claim that some evidence tests: its words, what the data say, the verdict, and where they are.

    `evidence` holds a folder for each machine and day; those with a `claims.json` are read, in order of their names.
    """
    columns = [("claim of a source document", False), ("here", False), ("verdict", False), ("evidence", False)]
    rows = []
    for path in sorted(evidence.glob("*/claims.json")):
        for claim in read_claims(path):
            if claim["experiment"]:
                figure = f" ({claim['figure']})" if claim["figure"] else ""
                because = describe_reason(claim) if claim["verdict"] != SUPPORTED else ""
                sentence = " ".join(filter(None, [claim["sentence"], because]))
                verdict = ", ".join(verdict_words(claim))
                rows.append([claim["claim"] + figure, sentence, verdict, path.parent.name])
    return markdown(Table(columns, rows))


def replication_text(evidence: Path) -> str:
    """A table for each source study of its figures beside ours, as the evidence has them.

    Of several folders that test a claim or have a figure, the first in order of their names counts.
    """
    claims: dict[str, dict[str, Any]] = {}
    measured: list[dict[str, Any]] = []
    for path in sorted(evidence.glob("*/claims.json")):
        judged = read_json(path, "judged claims", next="snakemake results/report/claims.json")
        for claim in judged["claims"]:
            if claim["id"] not in claims or (claim["experiment"] and not claims[claim["id"]]["experiment"]):
                claims[claim["id"]] = claim
        measured = [*judged["replication"], *measured]
    tables = replication_tables(replicate(claims.values(), measured))
    return "\n".join(f"## Study {study}\n\n{counts}.\n\n{markdown(table)}" for study, counts, table in tables)


def update(page: Path, text: str) -> None:
    """Put a text between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    write_text(page, f"{before}{BEGIN}\n{text}{END}{after}")
