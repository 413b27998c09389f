"""The page of what has changed since another report: `difference.py`, laid out as the other pages are."""

from collections.abc import Sequence
from pathlib import Path

from tokenscale.base.files import write_text
from tokenscale.report import difference, page


def write(
    baseline: Path, experiments: Sequence[str], tables: Path, output: Path, *, claims: Path | None = None
) -> None:
    """Write what the report of these tables (B) differs in from that of the folder `baseline` (A).

    `claims` is what the verb `claims` wrote of these tables. Raises UserError where `baseline` is no report's folder.
    """
    a = difference.read(baseline)
    b = difference.of_tables("this report", experiments, tables, claims)
    commit = (a.origin.get("git") or {}).get("commit")
    built = f", built at commit {commit[:12]}" if commit else ""
    heading = f"What has changed since {baseline.name}"
    lead = f"A is the report in {baseline}{built}; B is this report. Runs of two reports are no pairs."
    contents = [("the whole report", page.HOME)]
    sections = difference.difference(a, b).sections()
    text = page.render(
        "changes.html.j2", [], heading, contents, claims=None, home=page.HOME, lead=lead, changes=sections
    )
    write_text(output, text)
