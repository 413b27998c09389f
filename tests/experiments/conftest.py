"""Fixtures of stores and workflows, and the report that several files read."""

import pytest

from tests import logs
from tests.once import once
from tests.unit.conftest import lab, small_parts
from tests.workflow.conftest import ROOT, built, copy, fresh

__all__ = ["built", "copy", "demo_report", "fresh", "lab", "small_parts"]

EVIL = "<script>alert('x')</script> & \"co\""


@pytest.fixture(scope="session")
def demo_report(tmp_path_factory):
    """Tables, figures, claims, pages and PDF of an experiment and of one without runs. Nobody may
    change them.
    """
    return once(tmp_path_factory, "demo-report", make_report)


def make_report(folder):
    from tests.logs import tabulate
    from tokenscale.cli.main import main
    from tokenscale.report import page, pdf, save, summary
    from tokenscale.settings.registry import FIGURES

    tables = folder / "tables"
    figures = folder / "figures"
    logs.demo(folder, to="tables/demo", question=EVIL, note=EVIL)
    original = {"studies": ["004"], "measured": EVIL, "wrong": "All of it.", "ours": "Something."}
    other = logs.write_table(
        folder / "other.json", [], experiment="other", question="Another?", original=original
    )
    tabulate(other, folder / "runs", tables / "other")
    for name in FIGURES:
        save.save(name, tables / "demo", figures / "demo" / name)
    ledger = ["--ledger", str(ROOT / "config/replication.yaml")]
    assert main(["claims", *ledger, "--tables", str(tables), "--output", str(folder)]) == 0
    claims = folder / "claims.json"
    parts = []
    for name in ("demo", "other"):
        description = figures / name / summary.FILE
        summary.write(name, tables, description)
        parts.append(summary.read(description))
        page.write_experiment(parts[-1], figures, folder / f"{name}.html")
    page.write(parts[:1], figures, folder / "no_claims.html")
    page.write(parts[:1], figures, folder / "one.html", claims=claims)
    page.write(parts, figures, folder / "index.html", claims=claims)
    pdf.write(parts[:1], figures, folder / "report.pdf")
