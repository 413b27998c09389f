"""The findings of a README, written from the evidence that is kept beside it."""

from pathlib import Path

from tokenscale.analysis.claims import SUPPORTED
from tokenscale.base.files import write_text
from tokenscale.report.claims import describe_reason, read_claims, verdict_words
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


def update(readme: Path, evidence: Path) -> None:
    """Put them between the markers of a README."""
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    write_text(readme, f"{before}{BEGIN}\n{text(evidence)}{END}{after}")
