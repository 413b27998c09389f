"""The documentation of figures: its example draws one, and its table names them all."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_api_page_draws_a_figure(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(from tokenscale\.analysis.*?)```", (DOCS / "api.md").read_text(), re.S)
    tables = tmp_path / "results/tables/demo"
    ingest(logs.write_demo(tmp_path, repeats=2), tmp_path / "runs", tables, [tmp_path / "bench.json"])
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(example, made)  # noqa: S102
    assert isinstance(made["figure"], Figure)


def test_the_page_of_reports_names_every_figure():
    text = (DOCS / "report.md").read_text()
    listed = text[text.index("| compares | figures |") : text.index("An experiment's key `figures`")]
    assert set(re.findall(r"`([a-z_]+)`", listed)) == set(FIGURES)
