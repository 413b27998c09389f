"""Figures as functions of a DataFrame, as a notebook calls them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import query
from tokenscale.base.errors import UserError
from tokenscale.report import figures
from tokenscale.report.figure import figure_class
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    ingest(logs.write_demo(folder, repeats=2), folder / "runs", folder / "tables" / "demo", [folder / "bench.json"])
    return folder / "tables" / "demo"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_function_of_its_first_query_alone(tables, name):
    first = figure_class(name).queries[0]
    assert isinstance(getattr(figures, name)(query(first, tables)), Figure)
    assert f'query("{first}", tables)' in getattr(figures, name).__doc__


def test_without_an_inventory_all_runs_are_shown(tables):
    found = query("scaling", tables)
    alone = figures.scaling_throughput(found)
    beside = figures.scaling_throughput(found, inventory=query("inventory", tables))
    points = [[line.get_xydata().tolist() for axes in made.axes for line in axes.lines] for made in (alone, beside)]
    assert points[0] == points[1]
    assert sum(map(len, points[0])) > len(found)


def test_a_given_inventory_is_asked(tables):
    runs = query("inventory", tables).assign(sequence_length=lambda r: r["sequence_length"] + (r["world_size"] == 2))
    refused = figures.scaling_throughput(query("scaling", tables), inventory=runs)
    assert any("not comparable" in text.get_text() for axes in refused.axes for text in axes.texts)


def test_a_frame_of_another_query_is_told(tables):
    with pytest.raises(UserError, match=r"not one of the query scaling(.|\n)*missing +world_size"):
        figures.scaling_throughput(query("throughput", tables).drop(columns="world_size"))
    with pytest.raises(UserError, match="pandas DataFrame"):
        figures.scaling_throughput([1, 2])
    with pytest.raises(UserError, match="did you mean 'inventory'"):
        figures.scaling_throughput(query("scaling", tables), inventry=None)
    with pytest.raises(AttributeError, match="no figure 'scaling_thruput'"):
        figures.scaling_thruput  # noqa: B018


def test_all_figures_are_listed_and_matplotlib_waits():
    code = (
        "import sys; from tokenscale.report import figures; print(*dir(figures)); sys.exit('matplotlib' in sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(FIGURES) <= set(listed)


def test_the_example_of_the_readme_runs(tables, monkeypatch):
    (example,) = re.findall(
        r"```python\n(from tokenscale\.analysis\.queries.*?)```", (ROOT / "docs/report.md").read_text(), re.S
    )
    folder = tables.parents[1]
    (folder / "results").mkdir()
    (folder / "results" / "tables").symlink_to(tables.parent)
    monkeypatch.chdir(folder)
    made = {}
    exec(example, made)  # noqa: S102
    assert isinstance(made["figure"], Figure)
    assert (folder / "scaling.svg").read_text().startswith("<?xml")


def test_the_readme_names_every_figure():
    text = (ROOT / "docs/report.md").read_text()
    listed = text[text.index("**In a notebook**") : text.index("An experiment's key `figures`")]
    named = set(re.findall(r"`([a-z_]+)`", listed)) - {"figures"}
    assert named == set(FIGURES)
