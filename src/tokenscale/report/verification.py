"""Is a file of a report what its data and its code draw? Everything is drawn again, and what differs is named.

A file is `identical` where nothing that its passport names has changed and the same bytes are drawn again; `data
changed` or `code changed` where the tables or the source files at hand are others than the passport's; and `not ours`
where it has no passport of ours, or has one and shows something else.
"""

from pathlib import Path

from tokenscale.report import bundle, verification_figure, verification_report
from tokenscale.report import figure_metadata as passport
from tokenscale.report.verification_findings import Finding

#: where a project has its claims
LEDGER = Path("config/claims.yaml")


def verify(path: Path, results: Path, ledger: Path = LEDGER) -> list[Finding]:
    """What is found of a figure, a PDF, or a report's folder (also by its `index.html` or `SHA256SUMS`).

    `results` holds the tables to draw from; claims are judged again by the `ledger`. Raises UserError where a file, the
    tables or, of a report with claims, the ledger are missing.
    """
    if path.is_dir() or path.name in (bundle.SUMS, "index.html"):
        return verification_report.folder(path if path.is_dir() else path.parent, results, ledger)
    if path.suffix.lower() == ".pdf":
        return _pdf(path, results, ledger)
    return [verification_figure.figure(path, results)]


def _pdf(path: Path, results: Path, ledger: Path) -> list[Finding]:
    """A figure's PDF, the whole report, or pages cut out of it."""
    carried = passport.read(path)
    if carried is not None and "figure" in carried:
        return [verification_figure.figure(path, results)]
    pages = passport.open_pdf(path).pages
    if carried is not None and "report" in carried:
        return verification_report.document(path, carried, results, ledger)
    return [verification_figure.page(path, number, found, results, len(pages)) for number, found in enumerate(pages, 1)]
