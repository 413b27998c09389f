"""What the figures draw is what the logs say: numbers held against the synthetic logs, and runs that are left out."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from tests import logs
from tests.experiments.test_figures import parts, texts
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import query
from tokenscale.costs.flops import parameters
from tokenscale.report import panels, text_layout
from tokenscale.report.drawings import over_time, scaling
from tokenscale.report.figure import figure_class
from tokenscale.report.style import legend_columns, looks, settle
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

GPU = logs.HARDWARE | {"device": "NVIDIA H100 80GB HBM3", "device_kind": "cuda", "cores": 64, "threads_per_rank": 8}


def made(folder, runs, further=(), **options):
    """Tables of these runs."""
    return logs.made(
        folder, runs, parameters=lambda run: parameters(run.model.with_vocabulary(4096)), **options, further=further
    )


def dots(axes):
    """Points that are drawn without a line."""
    return [point for line in axes.lines if line.get_linestyle() == "None" for point in line.get_xydata().tolist()]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """Two approaches on one, two and four GPUs, two repeats, 250 steps."""
    shape = {"model": PRESETS["llama-150m"], "precision": "bf16", "steps": 250}
    runs = [logs.settings(a, w, r, **shape) for a in ("packed", "padded") for w in (1, 2, 4) for r in (0, 1)]
    return made(tmp_path_factory.mktemp("gpus"), runs, hardware=GPU)


def test_utilisation_is_drawn_under_four_conventions_where_a_peak_is_known(gpus):
    kind, rows = parts("mfu_comparison", gpus)
    (axes,) = kind(*rows).draw().axes
    assert len(dots(axes)) == 4 * 12
    found = kind(*rows).data()
    assert sorted(x for x, _ in dots(axes)) == pytest.approx(sorted(100 * found[list(scaling.CONVENTIONS)].stack()))
    assert "989.4 TFLOP/s in bf16 (NVIDIA H100 whitepaper" in kind(*rows).caption()
    assert "peak FLOP/s" in axes.get_xlabel()


def test_without_a_peak_operations_are_drawn_and_no_utilisation(tmp_path):
    kind, rows = parts("mfu_comparison", made(tmp_path, [logs.settings(world_size=w) for w in (1, 2)]))
    drawn = texts(kind(*rows).draw())
    assert any("achieved TFLOP/s" in text for text in drawn) and not any("MFU" in text for text in drawn)
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
    assert len(arrows) == 2 and {line.get_xdata()[0] for line in arrows} == {left.get_xlim()[1] / 1.06}
    assert "1 of 3" in texts(figure)
    assert "1 of 3 runs reached it" in kind(*frames).caption()
    assert "stated before the runs" in kind(*frames).caption()
    assert "the highest that any run ended with" in kind(query("time_to_target", tables), inventory).caption()
    assert not [line for line in left.lines if line.get_linewidth() == 2], "a median that is not known is drawn"
    assert "not (1 of 3 reached)" in kind(*frames).alt()


def long_named(frame):
    """The same rows, their series named as an experiment of several factors names them."""
    if "series" not in frame:
        return frame
    levels = ", optimizer.learning_rate_schedule=cosine_of_{0}_with_restarts, corpus.cleaning.shortest=200_for_{0}"
    return frame.assign(series=[f"{name}{levels.format(name)}" for name in frame["series"]])


def outside(figure):
    """Texts that end beyond the figure's sides, and numbers of an axis below that overlap."""
    found, width = [], figure.bbox.width
    for legend in figure.legends:
        boxes = [(text.get_window_extent(), text.get_text()) for text in legend.get_texts()]
        found += [text for box, text in boxes if box.x1 > width + 1]
    for axes in figure.axes:
        lone = [t for t in axes.get_children() if isinstance(t, Text) and t.get_text().strip()]
        names = [label for label in axes.get_yticklabels() if label.get_text()]
        for text in (*lone, *names, axes.xaxis.label):
            box = text.get_window_extent()
            found += [text.get_text()] * bool(box.x0 < -1 or box.x1 > width + 1)
        low, high = axes.get_xlim()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=False)
        boxes = [(t.get_window_extent(), t.get_text()) for x, t in labels if low <= x <= high and t.get_text()]
        found += [f"{b} over {a}" for (one, a), (two, b) in itertools.pairwise(boxes) if one.x1 > two.x0]
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_long_names_stay_in_the_figure_and_leave_room_for_numbers(gpus, name):
    kind, rows = parts(name, gpus)
    rows = [long_named(frame) for frame in rows]
    figure = kind(*rows).draw()
    settle(figure)
    assert outside(figure) == []


def test_names_of_rows_are_wrapped_or_cut_and_stay_apart():
    long = "padded, optimizer.learning_rate_schedule=cosine, corpus.cleaning.shortest=200, {}"
    assert text_layout.names(["packed", long.format("eos=True")]) == [
        "packed",
        "padded, …\neos=True",
    ]
    same = [long.format(x) + ", micro_batch=4, sequence_length=2048, precision=bf16" for x in ("eos=True", "eos=False")]
    assert len(set(text_layout.names(same))) == 2


def test_differences_of_losses_are_found_where_one_was_made(tmp_path):
    runs = [logs.settings("packed", w) for w in (1, 2)]
    tables = made(tmp_path, runs)
    path = tmp_path / "runs" / runs[1].identity  # half of the useful tokens are this rank's
    logs.edit(path, lambda s: s | {"loss_sum": s["loss_sum"] + (s["step"] == 7) * s["useful_tokens"]}, rank="00000")
    ingest(tmp_path / "runs.json", tmp_path / "runs", tables)
    kind, rows = parts("ddp_verification_loss", tables)
    found = kind(*rows).data().set_index("step")
    assert found.loc[7, "largest_difference"] == pytest.approx(0.5, rel=1e-2)
    assert found.loc[6, "largest_difference"] < 1e-9
    assert found["so_far"].is_monotonic_increasing and found.loc[11, "so_far"] == found.loc[7, "largest_difference"]
    assert "The largest difference is 0.5 nats" in kind(*rows).caption()


def test_points_of_differences_keep_the_largest_of_their_steps(gpus):
    whole = query("loss_difference", gpus, points=1000)
    short = query("loss_difference", gpus)
    assert whole.groupby("run_id").size().unique().tolist() == [250]
    assert short.groupby("run_id").size().unique().tolist() == [100]
    largest = [rows.groupby("run_id")["largest_difference"].max().to_dict() for rows in (whole, short)]
    assert largest[0] == largest[1] and short["steps"].sum() == len(whole)
    assert short["same_data"].all()


def test_parts_of_a_step_add_up_to_it(gpus):
    kind, rows = parts("step_time_breakdown", gpus)
    found = kind(*rows).data()
    assert found[list(over_time.PARTS)].sum(axis=1).tolist() == pytest.approx(found["step_s"].tolist())


def test_one_micro_batch_is_no_trend(tmp_path):
    kind, rows = parts("batch_size_comparison", made(tmp_path, [logs.settings(a) for a in ("packed", "padded")]))
    assert "no trend can be seen" in kind(*rows).caption()


def test_the_held_out_world_size_tests_the_model(tmp_path):
    runs = [logs.settings("packed", w, r, global_batch=8 * w, micro_batch=8) for r in (0, 1) for w in (1, 2, 4)]
    kind, rows = parts("scaling_model", made(tmp_path, runs, further=("global_batch",), hardware=GPU))
    found = kind(*rows).data()
    assert set(found.loc[found["kind"] == "measured, not fitted", "world_size"]) == {4}
    model = found[found["kind"] == "model"].set_index("world_size")
    assert (model["low"] <= model["useful_tokens_per_s"]).all() and 4 in model.index
    assert (model["useful_tokens_per_s"] <= model["high"]).all() and (model["low"] > 0).all()
    figure = kind(*rows).draw()
    assert any("a model" in axes.get_title(loc=side) for axes in figure.axes for side in ("left", "right"))
    assert "A model, not a measurement" in kind(*rows).caption()
    assert "at 4 predicted over measured" in kind(*rows).caption()
    assert (
        model.index.max() == 16 and "32 ranks cannot be predicted from these sizes: measure 4" in kind(*rows).caption()
    )


def test_a_series_that_cannot_be_fitted_says_why(gpus, tmp_path):
    kind, rows = parts("scaling_model", gpus)
    assert set(kind(*rows).data()["kind"]) == {"measured, fitted", "measured, not fitted"}
    assert "No model of packed: strong scaling" in kind(*rows).caption()
    crowded = GPU | {"device": "cpu", "device_kind": "cpu", "cores": 1, "threads_per_rank": 1}
    kind, rows = parts("scaling_model", made(tmp_path, [logs.settings(world_size=w) for w in (1, 2)], hardware=crowded))
    assert "No model of packed: ranks of these runs share the cores of one machine" in kind(*rows).caption()


def test_long_names_are_shortened_and_lines_without_an_approach_differ():
    names = [f"packed, layout.tensor={n}" for n in (2, 4, 8)]
    assert panels.short(names) == ["tensor=2", "tensor=4", "tensor=8"]
    assert panels.short(["packed", "padded"]) == ["packed", "padded"]
    found = looks([f"packed, layout.tensor={n}" for n in range(20)])
    told = {(options["color"], options["marker"], options["linestyle"]) for options in found.values()}
    assert len(told) == 20
    assert legend_columns(["x" * 25] * 3 + ["y" * 23] * 6, 4) == 3


def test_bytes_of_another_tokenizers_ids_are_not_compared(tmp_path):
    manifests = logs.write_stores(tmp_path / "tokens", {"packed": 4, "token-list": 2})
    kind, rows = parts("storage_against_entropy", logs.ingested(tmp_path, stores=manifests))
    assert kind(*rows).finding() == "Bytes a token: 2 with token-list to 4 with packed"
    both = kind(pd.concat([rows[0], rows[0].assign(tokenizer="other", bytes_per_id=9.0)], ignore_index=True))
    assert both.finding() == both.title and "other, token-list 9" in both.alt()
