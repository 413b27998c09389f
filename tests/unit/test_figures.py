"""The five figures: from tables with runs, without runs, with one cell gone; equal bytes."""

import pytest
from matplotlib.figure import Figure

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import connect
from tokenscale.report import registry, save
from tokenscale.report.svg import inline
from tokenscale.report.words import OVERSUBSCRIBED, SHARED_CORES


def made(folder, **options):
    ingest(logs.write_demo(folder, **options), folder / "runs", folder / "tables", [folder / "bench.json"])
    return folder / "tables"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return made(tmp_path_factory.mktemp("figures"), repeats=3)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    runs = [logs.settings(a, w) for a in logs.APPROACHES for w in (1, 2)]
    ingest(logs.write_table(folder / "runs.json", runs), folder / "runs", folder / "tables")
    return folder / "tables"


def parts(name, tables):
    with connect(tables) as connection:
        return registry.module(name), save.frames(name, connection)


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.mark.parametrize("name", registry.FIGURES)
def test_figures_have_units_words_and_data(tables, name):
    module, rows = parts(name, tables)
    figure = module.draw(*rows)
    assert isinstance(figure, Figure)
    assert all(axes.get_xlabel() for axes in figure.axes)
    caption = module.caption(*rows)
    assert "range, not an interval" in caption or name == "loss_over_time"
    assert "95 %" not in caption
    assert len(module.alt(*rows)) > 40
    assert len(module.data(*rows)) > 0


@pytest.mark.parametrize("name", registry.FIGURES)
def test_figures_without_data_say_so(empty, name):
    module, rows = parts(name, empty)
    assert any("no data: 0 of" in text for text in texts(module.draw(*rows)))
    assert module.caption(*rows)
    assert "no data" in module.alt(*rows).lower()


@pytest.mark.parametrize("name", registry.FIGURES)
def test_figures_without_a_single_run_listed_are_drawn(tmp_path, name):
    ingest(logs.write_table(tmp_path / "runs.json", []), tmp_path / "runs", tmp_path / "tables")
    module, rows = parts(name, tmp_path / "tables")
    assert module.draw(*rows) and module.caption(*rows) and module.alt(*rows)
    module.data(*rows)


def test_one_gone_cell_leaves_the_others(tmp_path):
    runs = [logs.settings(a) for a in ("packed", "padded")]
    logs.write_run(tmp_path / "runs", runs[0])
    ingest(logs.write_table(tmp_path / "runs.json", runs), tmp_path / "runs", tmp_path / "tables")
    module, rows = parts("tokens_per_second_comparison", tmp_path / "tables")
    assert "1 of 2 runs (1 missing)" in module.caption(*rows)
    assert "no data" in texts(module.draw(*rows))


def test_every_run_is_drawn(tables):
    module, rows = parts("tokens_per_second_comparison", tables)
    left = module.draw(*rows).axes[0]
    dots = [line for line in left.lines if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in dots) == 15


@pytest.mark.parametrize(
    ("threads", "said"),
    [({1: 2, 2: 2}, OVERSUBSCRIBED), ({1: 2, 2: 1}, SHARED_CORES), ({1: 1, 2: 1}, None)],
)
def test_a_cpu_whose_cores_are_shared_is_no_scaling_measurement(tmp_path, threads, said):
    runs = [logs.settings(world_size=w) for w in threads]
    for run in runs:
        logs.write_run(tmp_path / "runs", run, hardware=logs.HARDWARE | {"threads_per_rank": threads[run.layout.data]})
    ingest(logs.write_table(tmp_path / "runs.json", runs), tmp_path / "runs", tmp_path / "tables")
    module, rows = parts("scaling_throughput", tmp_path / "tables")
    shown = [t for t in texts(module.draw(*rows)) if t in (OVERSUBSCRIBED, SHARED_CORES)]
    assert shown == ([said] if said else [])


def test_equal_tables_give_equal_files(tables, tmp_path):
    for name in registry.FIGURES:
        with connect(tables) as connection:
            one = [p.read_bytes() for p in save.save(name, connection, tmp_path / "one" / name)]
            two = [p.read_bytes() for p in save.save(name, connection, tmp_path / "two" / name)]
        assert one == two


def test_an_inlined_drawing_has_its_own_ids_and_the_pages_colours(tables, tmp_path):
    with connect(tables) as connection:
        path = save.save("loss_over_time", connection, tmp_path / "f")[0]
    piece = inline(path.read_text(), "p1", 'a "quoted" <alt>')
    assert "currentColor" in piece and "#1b1e23" not in piece
    assert 'aria-label="a &quot;quoted&quot; &lt;alt&gt;"' in piece
    assert "http" not in piece
    assert piece.count('id="') == piece.count('id="p1-')
    assert piece.count('href="#') == piece.count('href="#p1-')
    assert piece.count("url(#") == piece.count("url(#p1-")
