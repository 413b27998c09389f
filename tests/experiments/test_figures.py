"""The figures: from tables with runs, without runs, with one cell gone; equal bytes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests import golden, logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import connect, query
from tokenscale.base.files import read_json, sha256_text, write_json
from tokenscale.report import save
from tokenscale.report.captions import OVERSUBSCRIBED
from tokenscale.report.figure import figure_class
from tokenscale.report.style import inline
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]


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
    return logs.ingested(folder, runs)


@pytest.fixture(scope="module")
def unlisted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlisted")
    return logs.ingested(folder, [])


def parts(name, tables):
    with connect(tables) as connection:
        kind = figure_class(name)
        return kind, [query(q, connection) for q in kind.queries]


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """One rank, DDP on two and tensor groups of two with two copies on four; pipelines of two, 1 to 4 micro-batches."""
    folder = tmp_path_factory.mktemp("laid_out")
    base = logs.settings(steps=6, model=PRESETS["llama-small"])
    found = [LayoutSettings(), LayoutSettings(data=2), LayoutSettings(data=2, tensor=2)]
    runs = [replace(base, layout=layout, repeat=k) for layout in found for k in (0, 1)]
    for name, chunks in (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        layout = LayoutSettings(pipeline=2, schedule=name, stages_per_rank=chunks)
        runs += [replace(base, layout=layout, micro_batch=b) for b in (8, 4, 2) if (name, b) != ("interleaved", 8)]
    for run in runs:
        path, changed = logs.write_run(folder / "runs", run), {"micro_steps": run.global_batch // run.micro_batch}
        if run.layout.pipeline > 1:
            changed |= {"forward_s": 0.03, "backward_s": 0.04, "bubble_s": 0.07}  # together shorter than the step
        logs.edit(path, lambda step, changed=changed: step | changed)
        for rank in range(run.layout.world_size) if run.layout.pipeline == 1 else ():
            logs.add_memory(path, (1e6, 2e6, 3e6, 4e6), rank)
    degrees = ("pipeline", "schedule", "stages_per_rank", "tensor")
    return logs.ingested(folder, runs, further=(*(f"layout.{d}" for d in degrees), "micro_batch"))


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """Three repeats on one and two ranks, eight rows a rank."""
    folder = tmp_path_factory.mktemp("weak")
    runs = [logs.settings("packed", w, r, global_batch=8 * w, micro_batch=8) for r in range(3) for w in (1, 2)]
    return logs.made(folder, runs, further=("global_batch",))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Three stores of one text, which no run reads."""
    folder = tmp_path_factory.mktemp("stored")
    manifests = logs.write_stores(folder / "tokens", {"packed": 4, "padded": 8, "token-list": 2})
    measured = [logs.write_storage_benchmark(folder / "bench.json")]
    return logs.ingested(folder, [], measured, stores=manifests)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a model wrote, of which the logs hold nothing."""
    folder = tmp_path_factory.mktemp("written")
    measured = [logs.write_inference_benchmark(folder / "bench.json")]
    return logs.ingested(folder, [], measured)


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """Three repeats on one and two ranks, each with two sentences translated at the end."""
    folder = tmp_path_factory.mktemp("translated")
    runs = [replace(logs.settings(world_size=world, steps=6), repeat=k) for world in (1, 2) for k in range(3)]
    texts = ["the cat sat on the mat", "a dog barks at night"]
    for run in runs:
        path = logs.write_run(folder / "runs", run)
        for number, text in enumerate(texts):
            logs.add_event(path, "translation", hypothesis=texts[0], number=number, reference=text)
    return logs.ingested(folder, runs)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three repeats of two mixtures of two corpora, one of them with stages."""
    folder, runs = tmp_path_factory.mktemp("mixed"), []
    sources = tuple(MixtureSource(CorpusSettings(name)) for name in ("prose", "code"))
    half = (MixtureStage(None, (0.5, 0.5)),)
    staged = (MixtureStage(1024 * 24, (1.0, 0.0)), MixtureStage(None, (0.0, 1.0)))
    for name, stages in (("half", half), ("code-last", staged)):
        fields = {"corpus": CorpusSettings(name), "mixture": MixtureSettings(sources, stages)}
        runs += [logs.settings(repeat=k, **fields) for k in range(3)]
    for run in runs:
        path = logs.write_run(folder / "runs", run)
        for number, name in enumerate(("prose", "code")):
            for step in (0, 12):
                found = {"step": step, "corpus": name, "loss_sum": 100 * (3 - step / 12 + number + 0.1 * run.repeat)}
                logs.add_event(path, "source_validation", useful_tokens=100, rows=4, **found)
    return logs.ingested(folder, runs, further=("corpus.name",))


#: figure → what it is drawn from where the demo does not have it
FITTING = {
    "mixture_losses": "mixed",
    "storage_against_entropy": "stored",
    "storage_benchmark": "stored",
    "memory_by_method": "laid_out",
    "pipeline_bubble": "laid_out",
    "scaling_weak": "weak",
    "scaling_model": "weak",
    "translation": "translated",
    "inference_tokens_per_second": "written",
}
#: figures that show no spread of repeats: every run is a line
CURVES = {
    "loss_over_time",
    "memory_by_method",
    "tokens_per_second_over_time",
    "ddp_verification_loss",
    "scaling_model",
    "storage_against_entropy",
}


def labelled(axes):
    """Has it a label below it, or below the last of the panels that share its axis? A second axis has one beside it."""
    shared = axes.get_shared_x_axes().get_siblings(axes)
    return any(other.get_xlabel() for other in shared) or axes.get_ylabel() == "reached" or not axes.get_visible()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_units_words_and_data(request, name):
    kind, rows = parts(name, request.getfixturevalue(FITTING.get(name, "tables")))
    figure = kind(*rows).draw()
    assert isinstance(figure, Figure)
    assert all(labelled(axes) for axes in figure.axes)
    caption = kind(*rows).caption()
    spread = "no known spread" if name.startswith("pipeline") else "range, not an interval"
    assert spread in caption or name in CURVES
    # a few runs have no such interval; sentences that were translated do
    assert ("95 %" in caption) == (name == "translation")
    assert len(kind(*rows).alt()) > 40
    assert len(kind(*rows).data()) > 0


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_the_golden_ones(request, name):
    with save.Tables(request.getfixturevalue(FITTING.get(name, "tables"))) as tables:
        loaded = save.load_figure(name, tables)
        drawn = save.draw(loaded, kinds=["svg"])["svg"]
    found = {"csv": sha256_text(loaded.csv), "svg": golden.hash_drawing(drawn)}
    golden.compare("figures", {name: found}, part=True)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("folder", ["empty", "unlisted"])
def test_figures_without_data_say_so(request, folder, name):
    kind, rows = parts(name, request.getfixturevalue(folder))
    figure = kind(*rows)
    assert any("no data: 0 of" in text for text in texts(figure.draw()))
    assert figure.caption() and not len(figure.data())
    assert "no data" in figure.alt().lower()


@pytest.mark.parametrize(
    "name",
    ["tokens_per_second_comparison", "batch_size_comparison", "training_time", "tokens_per_second_over_time",
     "step_time_breakdown", "scaling_throughput", "mfu_comparison", "data_stall_share", "padding_share"],
)  # fmt: skip
def test_a_repeat_that_one_series_has_alone_moves_no_number_beside_others(tables, name):
    kind, frames = parts(name, tables)
    packed = [frame[(frame["repeat"] == 0) | (frame["approach"] == "packed")] for frame in frames]
    measured = packed[0].select_dtypes(float).columns
    rows = packed[0].copy()
    rows.loc[rows["repeat"] > 0, measured] *= 10
    figure, common = kind(rows, packed[1]), kind(*(frame[frame["repeat"] == 0] for frame in frames))
    assert len(figure.rows) > len(common.rows) > 0
    told = [figure.alt(), figure.finding()] if figure.found or name == "scaling_throughput" else [figure.alt()]
    assert [text.replace(" (repeat 0)", "") for text in told] == [common.alt(), common.finding()][: len(told)]


@pytest.mark.parametrize("name", ["tokens_per_second_comparison", "parallel_methods", "frameworks", "mixture_losses",
                                  "translation", "time_to_target_loss"])  # fmt: skip
def test_bars_are_of_the_repeats_that_all_cells_have(request, name):
    kind, frames = parts(name, request.getfixturevalue(FITTING.get(name, "tables")))
    cells = frames[-1].set_index("run_id")["cell"]
    alone = cells.index[cells == cells.iloc[0]]  # one cell keeps its further repeats, with other values
    common = [frame[frame["repeat"] == 0] if "repeat" in frame else frame for frame in frames]
    more = [frame[(frame["repeat"] == 0) | frame["run_id"].isin(alone)] for frame in frames if "repeat" in frame]
    for frame in more[:-1]:
        further, measured = frame["repeat"] > 0, frame.select_dtypes(float).columns.difference(["share"])
        frame.loc[further, measured] *= 0.5
    more = [more.pop(0) if "repeat" in frame else frame for frame in frames]
    figure, expected = kind(*more), kind(*common)
    assert len(figure.rows) > len(expected.rows) > 0
    drawn = [[line for axes in made.draw().axes for line in axes.lines] for made in (figure, expected)]
    bars = [[line for line in lines if line.get_linewidth() == 2 or line.get_marker() == "_"] for lines in drawn]
    found, few = ([line.get_xydata().tolist() for line in lines] for lines in bars)
    assert found == few and len(few) > 1
    assert "repeat 0, which all cells have" in figure.caption() and "order-statistic" not in figure.caption()
    if name != "time_to_target_loss":  # which counts all runs that reached the target
        assert figure.alt().replace(" (repeat 0)", "") == expected.alt()


def test_methods_say_whether_they_measure_scaling(laid_out):
    kind, rows = parts("parallel_methods", laid_out)
    found = kind(*rows).data().set_index("method")
    found = found.rename(index=lambda name: name.removesuffix(", micro_batch=8"))  # it varies, too
    assert found.loc[["single", "ddp", "tp 2 + ddp 2"], "scaling_measurement"].tolist() == [
        "reference", "yes, if idle", "no: oversubscribed CPU"
    ]  # fmt: skip
    for text in (kind(*rows).caption(), kind(*rows).alt()):
        assert f"4 ranks, {OVERSUBSCRIBED}" in text


def test_a_method_without_a_run_on_one_rank_has_no_efficiency_to_show(tmp_path):
    kind, rows = parts("parallel_methods", logs.made(tmp_path, [logs.settings(world_size=2)]))
    assert kind(*rows).data()["scaling_measurement"].tolist() == ["no: no run on one rank"]
    assert "–" in kind(*rows).table().rows[0]


@pytest.mark.parametrize(
    ("open_s", "ms", "said"),
    [
        (0.9, 1.0, "from 401 batches on"),  # 0.8 s later, 2 ms a batch saved: equal after 400
        (0.05, 1.0, "from the first batch on"),
        (0.05, 4.0, None),
    ],
)
def test_the_break_even_of_a_pair_is_told_where_there_is_one(tmp_path, open_s, ms, said):
    path = logs.write_benchmark(tmp_path / "bench.json", rounds=1)
    content = read_json(path)
    one, arms = content["records"][0], [("padded", 0.1, 3.0), ("pretokenized-padded", open_s, ms)]
    records = [one | {"arm": arm, "open_s": o, "seconds": 1e-3 * ms * one["batches"]} for arm, o, ms in arms]
    write_json(path, content | {"records": records})
    kind, rows = parts("tokenization_benchmark", logs.ingested(tmp_path, benchmarks=[path]))
    caption = kind(*rows).caption()
    assert (f"pretokenized-padded needs less time than padded {said}" in caption) if said else (" on;" not in caption)


def test_a_stopped_run_is_drawn_to_its_stop_and_counts_for_nothing(tmp_path):
    runs = [logs.settings("packed", repeat=r) for r in range(3)]
    logs.made(tmp_path, runs, attempts=lambda run: [{"diverges": 5}] if run.repeat == 1 else None)
    kind, rows = parts("loss_over_time", tmp_path / "tables")
    loss = rows[0]
    last = loss[loss["stopped"]].iloc[-1]
    left = kind(*rows).draw().axes[0]
    crosses = [line for line in left.lines if line.get_marker() == "x"]
    assert [line.get_xydata().tolist() for line in crosses] == [[[last["useful_tokens_seen"], last["loss"]]]]
    assert "2 of 3 runs (1 invalid)" in kind(*rows).caption()
    assert "A cross ends 1 run " in kind(*rows).caption()
    middle = next(line for line in left.lines if line.get_label() == "packed").get_ydata()
    assert middle == pytest.approx(loss[~loss["stopped"]].groupby("step")["loss"].median().tolist())
    assert loss["stopped"].sum() == 5


def test_nothing_but_stopped_runs_is_drawn_as_such(tmp_path):
    kind, rows = parts("loss_over_time", logs.made(tmp_path, [logs.settings()], attempts=[{"diverges": 5}]))
    assert any(line.get_marker() == "x" for line in kind(*rows).draw().axes[0].lines)
    assert "0 of 1 run (1 invalid)" in kind(*rows).caption()
    assert "no data" in kind(*rows).alt().lower()


def test_an_alias_gives_the_files_of_its_figure(tables, tmp_path):
    files = [save.save(name, tables, tmp_path / name) for name in ("efficiency_comparison", "scaling_throughput")]
    assert [path.name.split(".")[0] for path in files[0]] == ["efficiency_comparison"] * 6
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_an_inlined_drawing_has_its_own_ids_and_the_pages_colours(tables, tmp_path):
    path = save.save("loss_over_time", tables, tmp_path / "f")[0]
    piece = inline(path.read_text(), "p1", "wide")
    assert "currentColor" in piece and "#1b1e23" not in piece
    assert "http" not in piece
    assert piece.count('id="') == piece.count('id="p1-')
    assert piece.count('href="#') == piece.count('href="#p1-')
    assert piece.count("url(#") == piece.count("url(#p1-")


# -- the documentation of figures: its example draws one, and its table names them all

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
