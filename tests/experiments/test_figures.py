import itertools
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests import golden, logs
from tests.logs import tabulate
from tokenscale.analysis.queries import connect, query
from tokenscale.base.files import read_json, sha256_text, write_json
from tokenscale.costs.flops import parameters
from tokenscale.report import panels, save, text_layout
from tokenscale.report.captions import OVERSUBSCRIBED
from tokenscale.report.drawings import over_time, scaling
from tokenscale.report.figure import figure_class
from tokenscale.report.style import inline, looks, settle
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import FIGURES
from tokenscale.settings.run import ValidationSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(30)]


@pytest.fixture(scope="module")
def tables(demo_report):
    return demo_report / "tables/demo"


@pytest.fixture(scope="module")
def without_data(tmp_path_factory):
    """Tables of runs that have no logs, and of no run."""
    runs = [logs.settings(a, w) for a in logs.APPROACHES for w in (1, 2)]
    return [logs.ingested(tmp_path_factory.mktemp("empty"), of) for of in (runs, [])]


@pytest.fixture(scope="module")
def benchmarked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarked")
    manifests = logs.write_stores(folder / "tokens", {"packed": 4, "padded": 8, "token-list": 2})
    measured = [
        logs.write_storage_benchmark(folder / "bench.json"),
        logs.write_inference_benchmark(folder / "texts.json"),
    ]
    return logs.ingested(folder, [], measured, stores=manifests)


def parts(name, tables):
    with connect(tables) as connection:
        kind = figure_class(name)
        return kind, [query(q, connection) for q in kind.queries]


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """One rank, DDP on two and tensor groups of two with two copies on four; pipelines of two, 1 to
    4 micro-batches.
    """
    folder = tmp_path_factory.mktemp("laid_out")
    base = logs.settings(steps=6, model=PRESETS["llama-small"])
    found = [LayoutSettings(), LayoutSettings(data=2), LayoutSettings(data=2, tensor=2)]
    runs = [replace(base, layout=layout, repeat=k) for layout in found for k in (0, 1)]
    for name, chunks in (
        ("naive", 1),
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zero-bubble", 1),
    ):
        layout = LayoutSettings(pipeline=2, schedule=name, stages_per_rank=chunks)
        runs += [
            replace(base, layout=layout, micro_batch=b)
            for b in (8, 4, 2)
            if (name, b) != ("interleaved", 8)
        ]
    for run in runs:
        path = logs.write_run(folder / "runs", run)
        changed = {"micro_steps": run.global_batch // run.micro_batch}
        if run.layout.pipeline > 1:
            # together shorter than the step
            changed |= {"forward_s": 0.03, "backward_s": 0.04, "bubble_s": 0.07}
        logs.edit(path, lambda step, changed=changed: step | changed)
        for rank in range(run.layout.world_size) if run.layout.pipeline == 1 else ():
            logs.add_memory(path, (1e6, 2e6, 3e6, 4e6), rank)
    degrees = ("pipeline", "schedule", "stages_per_rank", "tensor")
    return logs.ingested(folder, runs, further=(*(f"layout.{d}" for d in degrees), "micro_batch"))


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    runs = [
        logs.settings("packed", w, r, global_batch=8 * w, micro_batch=8)
        for r in range(3)
        for w in (1, 2)
    ]
    return logs.made(tmp_path_factory.mktemp("weak"), runs, further=("global_batch",))


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """Three repeats on one and two ranks, each with two sentences translated at the end."""
    folder = tmp_path_factory.mktemp("translated")
    validation = ValidationSettings(bleu=2)
    runs = [
        logs.settings(world_size=world, steps=6, repeat=k, validation=validation)
        for world in (1, 2)
        for k in range(3)
    ]
    texts = ["the cat sat on the mat", "a dog barks at night"]
    for run in runs:
        path = logs.write_run(folder / "runs", run)
        for number, text in enumerate(texts):
            translation = {"step": 6, "hypothesis": texts[0], "reference": text}
            logs.add_event(path, "translation", number=number, **translation)
    return logs.ingested(folder, runs)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three repeats of two mixtures of two corpora, one of them with stages."""
    folder = tmp_path_factory.mktemp("mixed")
    runs = []
    sources = tuple(MixtureSource(CorpusSettings(name)) for name in ("prose", "code"))
    half = (MixtureStage(None, (0.5, 0.5)),)
    staged = (MixtureStage(1024 * 24, (1.0, 0.0)), MixtureStage(None, (0.0, 1.0)))
    for name, stages in (("half", half), ("code-last", staged)):
        fields = {"corpus": CorpusSettings(name), "mixture": MixtureSettings(sources, stages)}
        runs += [logs.settings(repeat=k, **fields) for k in range(3)]
    for run in runs:
        path = logs.write_run(folder / "runs", run)
        events = (path / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
        for whole in map(json.loads, events):
            if whole["event"] != "validation":
                continue
            for corpus, share in (("prose", 0.45), ("code", 0.55)):
                logs.add_event(
                    path,
                    "source_validation",
                    step=whole["step"],
                    corpus=corpus,
                    loss_sum=share * whole["loss_sum"],
                    useful_tokens=whole["useful_tokens"] // 2,
                    rows=whole["rows"] // 2,
                    duration_s=whole["duration_s"] / 2,
                )
    return logs.ingested(folder, runs, further=("corpus.name",))


#: figure → what it is drawn from where the demo does not have it
FITTING = {
    "mixture_losses": "mixed",
    "storage_against_entropy": "benchmarked",
    "storage_benchmark": "benchmarked",
    "memory_by_method": "laid_out",
    "pipeline_bubble": "laid_out",
    "scaling_weak": "weak",
    "scaling_model": "weak",
    "translation": "translated",
    "inference_tokens_per_second": "benchmarked",
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
    """Has it a label below it, or below the last of the panels that share its axis? A second axis
    has one beside it.
    """
    shared = axes.get_shared_x_axes().get_siblings(axes)
    return (
        any(other.get_xlabel() for other in shared)
        or axes.get_ylabel() == "reached"
        or not axes.get_visible()
    )


def long_named(frame):
    """The same rows, their series named as an experiment of several factors names them."""
    if "series" not in frame:
        return frame
    levels = (
        ", optimizer.learning_rate_schedule=cosine_of_{0}_with_restarts, "
        "corpus.cleaning.shortest=200_for_{0}"
    )
    return frame.assign(series=[f"{name}{levels.format(name)}" for name in frame["series"]])


def outside(figure):
    """Texts that end beyond the figure's sides, and numbers of an axis below that overlap."""
    found = []
    width = figure.bbox.width
    for legend in figure.legends:
        found += [
            text.get_text()
            for text in legend.get_texts()
            if text.get_window_extent().x1 > width + 1
        ]
    for axes in figure.axes:
        lone = [t for t in axes.get_children() if isinstance(t, Text) and t.get_text().strip()]
        names = [label for label in axes.get_yticklabels() if label.get_text()]
        for text in (*lone, *names, axes.xaxis.label):
            box = text.get_window_extent()
            if box.x0 < -1 or box.x1 > width + 1:
                found += [text.get_text()]
        low, high = axes.get_xlim()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=False)
        boxes = [
            (t.get_window_extent(), t.get_text())
            for x, t in labels
            if low <= x <= high and t.get_text()
        ]
        found += [
            f"{b} over {a}" for (one, a), (two, b) in itertools.pairwise(boxes) if one.x1 > two.x0
        ]
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_units_words_and_data_room_for_long_names_and_say_where_they_have_none(
    request, without_data, name
):
    kind, rows = parts(name, request.getfixturevalue(FITTING.get(name, "tables")))
    made = kind(*rows)
    figure = kind(*map(long_named, rows)).draw()
    caption = made.caption()
    assert isinstance(figure, Figure) and all(labelled(axes) for axes in figure.axes)
    settle(figure)
    assert outside(figure) == []
    spread = "no known spread" if name.startswith("pipeline") else "The spread is the range"
    assert spread in caption or name in CURVES
    # a few runs have no such interval; sentences that were translated do
    assert ("95 %" in caption) == (name == "translation")
    assert len(made.alt()) > 40 and len(made.data()) > 0
    if name == "step_time_breakdown":
        assert made.data()[list(over_time.PARTS)].sum(axis=1).tolist() == pytest.approx(
            made.data()["step_s"].tolist()
        )
    for folder in without_data:
        kind, rows = parts(name, folder)
        figure = kind(*rows)
        assert any("no data: 0 of" in text for text in texts(figure.draw()))
        assert figure.caption() and not len(figure.data()) and "no data" in figure.alt().lower()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_the_golden_ones(request, name):
    if name in FITTING:
        with save.Tables(request.getfixturevalue(FITTING[name])) as tables:
            loaded = save.load_figure(name, tables)
        csv = loaded.csv
        drawn = save.draw(loaded, kinds=["svg"])["svg"]
    else:
        figures = request.getfixturevalue("demo_report") / "figures/demo"
        csv = (figures / f"{name}.csv").read_text()
        drawn = (figures / f"{name}.svg").read_bytes()
    found = {"csv": sha256_text(csv), "svg": golden.hash_drawing(drawn)}
    golden.compare("figures", {name: found}, part=True)


@pytest.mark.parametrize(
    "name",
    [
        "tokens_per_second_comparison",
        "batch_size_comparison",
        "training_time",
        "tokens_per_second_over_time",
        "step_time_breakdown",
        "scaling_throughput",
        "mfu_comparison",
        "data_stall_share",
        "padding_share",
    ],
)
def test_numbers_are_medians_of_all_repeats(tables, name):
    """Further repeats of one series, with other values, move its number and no other's."""
    kind, frames = parts(name, tables)
    packed = [frame[(frame["repeat"] == 0) | (frame["approach"] == "packed")] for frame in frames]
    measured = packed[0].select_dtypes(float).columns
    rows = packed[0].copy()
    rows.loc[rows["repeat"] > 0, measured] *= 10
    figure = kind(rows, packed[1])
    first = kind(*(frame[frame["repeat"] == 0] for frame in frames))
    assert len(figure.rows) > len(first.rows) > 0
    assert figure.alt() != first.alt() and "repeat 0" not in figure.alt() + figure.caption()


def test_names_are_shortened_wrapped_or_cut_and_stay_apart():
    names = [f"packed, layout.tensor={n}" for n in range(20)]
    assert panels.shorten_names(names)[:2] == ["tensor=0", "tensor=1"] and panels.shorten_names(
        ["packed", "x"]
    ) == ["packed", "x"]
    found = {(of["color"], of["marker"], of["linestyle"]) for of in looks(names).values()}
    assert len(found) == 20, "lines without an approach differ"
    long = "padded, optimizer.learning_rate_schedule=cosine, corpus.cleaning.shortest=200, {}"
    assert text_layout.wrap_names(["packed", long.format("eos=True")]) == [
        "packed",
        "padded, …\neos=True",
    ]
    same = [
        long.format(x) + ", micro_batch=4, sequence_length=2048, precision=bf16"
        for x in ("eos=True", "eos=False")
    ]
    assert len(set(text_layout.wrap_names(same))) == 2


def test_scaling_names_its_base_and_runs_without_an_efficiency(tmp_path):
    runs = [logs.settings(world_size=w, repeat=r) for w, r in ((2, 0), (4, 0), (4, 1))]
    kind, rows = parts("scaling_throughput", logs.made(tmp_path, runs))
    caption = kind(*rows).caption()
    assert "1 run has no efficiency: no run of its repeat was measured at world size 2" in caption
    assert "packed (N0 = 2)" in caption and "T(1)" not in " ".join(
        [caption, *texts(kind(*rows).draw())]
    )


def test_methods_say_whether_they_measure_scaling(laid_out, tmp_path):
    kind, rows = parts("parallel_methods", laid_out)
    found = kind(*rows).data().set_index("method")
    found = found.rename(index=lambda name: name.removesuffix(", micro_batch=8"))  # it varies, too
    assert found.loc[["single", "ddp", "tp 2 + ddp 2"], "scaling_measurement"].tolist() == [
        "reference",
        "yes, if idle",
        "no: oversubscribed CPU",
    ]
    for text in (kind(*rows).caption(), kind(*rows).alt()):
        assert f"4 ranks, {OVERSUBSCRIBED}" in text
    kind, rows = parts("parallel_methods", logs.made(tmp_path, [logs.settings(world_size=2)]))
    assert kind(*rows).data()["scaling_measurement"].tolist() == ["no: no run on one rank"]
    assert "–" in kind(*rows).table().rows[0]


@pytest.mark.parametrize(
    ("open_s", "ms", "said"),  # in the first, 0.8 s later, 2 ms a batch saved: equal after 400
    [(0.9, 1.0, "from 401 batches on"), (0.05, 1.0, "from the first batch on"), (0.05, 4.0, None)],
)
def test_the_break_even_of_a_pair_is_told_where_there_is_one(tmp_path, open_s, ms, said):
    path = logs.write_benchmark(tmp_path / "bench.json", rounds=1)
    content = read_json(path)
    one = content["records"][0]
    arms = [("padded", 0.1, 3.0), ("pretokenized-padded", open_s, ms)]
    records = [
        one | {"arm": arm, "open_s": o, "seconds": 1e-3 * ms * one["batches"]}
        for arm, o, ms in arms
    ]
    write_json(path, content | {"records": records})
    kind, rows = parts("tokenization_benchmark", logs.ingested(tmp_path, benchmarks=[path]))
    caption = kind(*rows).caption()
    assert (
        (f"pretokenized-padded needs less time than padded {said}" in caption)
        if said
        else (" on;" not in caption)
    )


def test_a_stopped_run_is_drawn_to_its_stop_and_counts_for_nothing(tmp_path):
    runs = [logs.settings("packed", repeat=r) for r in range(3)]
    logs.made(tmp_path, runs, attempts=lambda run: [{"diverges": 5}] if run.repeat == 1 else None)
    kind, rows = parts("loss_over_time", tmp_path / "tables")
    loss = rows[0]
    last = loss[loss["stopped"]].iloc[-1]
    left = kind(*rows).draw().axes[0]
    crosses = [line for line in left.lines if line.get_marker() == "x"]
    assert [line.get_xydata().tolist() for line in crosses] == [
        [[last["useful_tokens_seen"], last["loss"]]]
    ]
    assert "2 of 3 runs (1 invalid)" in kind(*rows).caption()
    assert "A cross ends 1 run " in kind(*rows).caption()
    middle = next(line for line in left.lines if line.get_label() == "packed").get_ydata()
    assert middle == pytest.approx(loss[~loss["stopped"]].groupby("step")["loss"].median().tolist())
    assert loss["stopped"].sum() == 5
    kind, rows = parts(
        "loss_over_time",
        logs.made(tmp_path / "alone", [logs.settings()], attempts=[{"diverges": 5}]),
    )
    assert any(line.get_marker() == "x" for line in kind(*rows).draw().axes[0].lines)
    assert (
        "0 of 1 run (1 invalid)" in kind(*rows).caption() and "no data" in kind(*rows).alt().lower()
    )


def test_an_alias_is_the_figure_that_it_stands_for():
    assert figure_class("efficiency_comparison") is figure_class("scaling_throughput")


def test_an_inlined_drawing_has_its_own_ids_and_the_pages_colours(demo_report):
    piece = inline((demo_report / "figures/demo/loss_over_time.svg").read_text(), "p1", "wide")
    assert "currentColor" in piece and "#1b1e23" not in piece and "http" not in piece
    assert all(
        piece.count(start) == piece.count(f"{start}p1-") for start in ('id="', 'href="#', "url(#")
    )


# -- what is drawn is what the logs say

GPU = logs.HARDWARE | {
    "device": "NVIDIA H100 80GB HBM3",
    "device_kind": "cuda",
    "cores": 64,
    "threads_per_rank": 8,
}


def made(folder, runs, further=(), **options):
    return logs.made(
        folder,
        runs,
        parameters=lambda run: parameters(run.model.with_vocabulary(4096)),
        **options,
        further=further,
    )


def dots(axes):
    return [
        point
        for line in axes.lines
        if line.get_linestyle() == "None"
        for point in line.get_xydata().tolist()
    ]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """Two approaches on one, two and four GPUs, two repeats, 250 steps."""
    shape = {"model": PRESETS["llama-150m"], "precision": "bf16", "steps": 250}
    runs = [
        logs.settings(a, w, r, **shape)
        for a in ("packed", "padded")
        for w in (1, 2, 4)
        for r in (0, 1)
    ]
    return made(tmp_path_factory.mktemp("gpus"), runs, hardware=GPU)


def test_utilisation_is_drawn_under_four_conventions_where_a_peak_is_known_and_else_operations(
    gpus, tmp_path
):
    kind, rows = parts("mfu_comparison", gpus)
    (axes,) = kind(*rows).draw().axes
    assert len(dots(axes)) == 4 * 12
    found = kind(*rows).data()
    assert sorted(x for x, _ in dots(axes)) == pytest.approx(
        sorted(100 * found[list(scaling.CONVENTIONS)].stack())
    )
    assert "989.4 TFLOP/s in bf16 (NVIDIA H100 whitepaper" in kind(*rows).caption()
    assert "peak FLOP/s" in axes.get_xlabel()
    kind, rows = parts(
        "mfu_comparison", made(tmp_path, [logs.settings(world_size=w) for w in (1, 2)])
    )
    drawn = texts(kind(*rows).draw())
    assert any("achieved TFLOP/s" in text for text in drawn) and not any(
        "MFU" in text for text in drawn
    )
    assert "No known peak of cpu: achieved TFLOP/s, no utilisation" in kind(*rows).caption()


def test_runs_that_did_not_reach_the_target_stand_at_the_edge_and_are_counted(tmp_path):
    tables = made(tmp_path, [logs.settings("packed", 1, r) for r in range(3)])
    kind = figure_class("time_to_target_loss")
    inventory = query("inventory", tables)
    losses = query("validation", tables)
    final = sorted(losses.loc[losses["last"], "loss"])
    frames = [query("time_to_target", tables, target=float(np.mean(final[:2]))), inventory]
    figure = kind(*frames).draw()
    left = figure.axes[0]
    arrows = [line for line in left.lines if line.get_marker() == ">"]
    assert len(arrows) == 2 and {line.get_xdata()[0] for line in arrows} == {
        left.get_xlim()[1] / 1.06
    }
    assert "1 of 3" in texts(figure)
    assert "of which 1 reached it" in kind(*frames).caption()
    assert "stated before the runs" in kind(*frames).caption()
    assert (
        "the highest that any run ended with"
        in kind(query("time_to_target", tables), inventory).caption()
    )
    assert not [line for line in left.lines if line.get_linewidth() == 2], (
        "a median that is not known is drawn"
    )
    assert "not (1 of 3 reached)" in kind(*frames).alt()


def test_differences_of_losses_are_found_where_one_was_made(tmp_path):
    runs = [logs.settings("packed", w) for w in (1, 2)]
    tables = made(tmp_path, runs)
    path = tmp_path / "runs" / runs[1].identity  # half of the useful tokens are this rank's
    logs.edit(
        path,
        lambda s: s | {"loss_sum": s["loss_sum"] + (s["step"] == 7) * s["useful_tokens"]},
        rank="00000",
    )
    tabulate(tmp_path / "runs.json", tmp_path / "runs", tables)
    kind, rows = parts("ddp_verification_loss", tables)
    found = kind(*rows).data().set_index("step")
    assert found.loc[7, "largest_difference"] == pytest.approx(0.5, rel=1e-2)
    assert found.loc[6, "largest_difference"] < 1e-9
    assert (
        found["so_far"].is_monotonic_increasing
        and found.loc[11, "so_far"] == found.loc[7, "largest_difference"]
    )
    assert "The largest difference is 0.5 nats" in kind(*rows).caption()


def test_points_of_differences_keep_the_largest_of_their_steps(gpus):
    whole = query("loss_difference", gpus, points=1000)
    short = query("loss_difference", gpus)
    assert whole.groupby("run_id").size().unique().tolist() == [250]
    assert short.groupby("run_id").size().unique().tolist() == [100]
    largest = [
        rows.groupby("run_id")["largest_difference"].max().to_dict() for rows in (whole, short)
    ]
    assert largest[0] == largest[1] and short["steps"].sum() == len(whole)
    assert short["same_data"].all()


def test_the_held_out_world_size_tests_the_model_and_a_series_that_cannot_be_fitted_says_why(
    gpus, tmp_path
):
    runs = [
        logs.settings("packed", w, r, global_batch=8 * w, micro_batch=8)
        for r in (0, 1)
        for w in (1, 2, 4)
    ]
    kind, rows = parts(
        "scaling_model", made(tmp_path, runs, further=("global_batch",), hardware=GPU)
    )
    found = kind(*rows).data()
    assert set(found.loc[found["kind"] == "measured, not fitted", "world_size"]) == {4}
    model = found[found["kind"] == "model"].set_index("world_size")
    assert (model["low"] <= model["useful_tokens_per_s"]).all() and 4 in model.index
    assert (model["useful_tokens_per_s"] <= model["high"]).all() and (model["low"] > 0).all()
    figure = kind(*rows).draw()
    assert any(
        "a model" in axes.get_title(loc=side) for axes in figure.axes for side in ("left", "right")
    )
    assert "A model, not a measurement" in kind(*rows).caption()
    assert "at 4 predicted over measured" in kind(*rows).caption()
    assert model.index.max() == 16
    assert "32 ranks cannot be predicted from these sizes: measure 4" in kind(*rows).caption()
    kind, rows = parts("scaling_model", gpus)
    assert set(kind(*rows).data()["kind"]) == {"measured, fitted", "measured, not fitted"}
    assert "No model of packed: strong scaling" in kind(*rows).caption()
    crowded = GPU | {"device": "cpu", "device_kind": "cpu", "cores": 1, "threads_per_rank": 1}
    runs = [logs.settings(world_size=w) for w in (1, 2)]
    kind, rows = parts("scaling_model", made(tmp_path / "crowded", runs, hardware=crowded))
    assert (
        "No model of packed: ranks of these runs share the cores of one machine"
        in kind(*rows).caption()
    )


def test_bytes_of_another_tokenizers_ids_are_not_compared(tmp_path):
    manifests = logs.write_stores(tmp_path / "tokens", {"packed": 4, "token-list": 2})
    kind, rows = parts("storage_against_entropy", logs.ingested(tmp_path, stores=manifests))
    assert kind(*rows).finding() == "Bytes a token: 2 with token-list to 4 with packed"
    both = kind(
        pd.concat([rows[0], rows[0].assign(tokenizer="other", bytes_per_id=9.0)], ignore_index=True)
    )
    assert both.finding() == both.title and "other, token-list 9" in both.alt()
