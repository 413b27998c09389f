"""Published points: each with its source, as printed there; the back-test says what their rows say, and saw no more."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import backtest
from benchmarks.backtest import collect_rows, group_by_series, load_points, run_backtest, score, split_prefixes

from tokenscale.base.errors import UserError

ROOT = Path(__file__).parents[2]
#: the series of the source study that the issue asks for
STUDY = ["1.41B padded", "1.41B pretokenized-padded", "1.41B padding-free", "1.41B token-list", "8.05B padded"]


def test_every_point_says_where_it_is_from_and_is_there_once():
    assert all(p.source and p.tokens_per_s > 0 and p.gpus_per_node > 0 for p in load_points())
    places = [(p.series, p.world_size) for p in load_points()]
    assert len(places) == len(set(places)) == 69
    assert all(row["source"] for row in backtest.load_all_reduces())


def test_points_of_a_series_differ_in_their_world_size_alone():
    shared = [name for name in backtest.PublishedPoint.__dataclass_fields__ if name.startswith(("gpu", "local", "seq"))]
    shared += ["model", "parameters", "method", "approach", "gradient_bytes", "tail_bytes"]
    for name, group in group_by_series(load_points()).items():
        for field in shared:
            assert len({getattr(p, field) for p in group}) == 1, (name, field)


def test_the_published_all_reduces_give_the_link_that_is_fitted_to_them():
    link = backtest.fit_published_link()
    assert 4 / link.beta_s_per_byte == pytest.approx(
        78.6e9, rel=0.01
    )  # the four links of a node; printed: 70 at 128 MiB
    for row in backtest.load_all_reduces():
        told = 2 * link.alpha_s + link.beta_s_per_byte * int(row["bytes"]) / 4
        assert told == pytest.approx(float(row["seconds"]), rel=0.03)


# -- the back-test


@pytest.fixture(scope="module")
def tested():
    return run_backtest()


def test_every_prefix_on_two_nodes_predicts_every_larger_size(tested):
    found, skipped = tested
    groups = group_by_series(load_points())
    assert sorted([*(one.series for one in found), *skipped]) == sorted(groups)
    assert {*STUDY, "Ultra-Scale Playbook DP"} <= {one.series for one in found}
    for one in found:
        group = groups[one.series]
        measured = {p.world_size: p.tokens_per_s for p in group}
        prefixes = split_prefixes(group)
        assert [f.world_sizes for f in one.fits] == [[p.world_size for p in fitted] for fitted, _ in prefixes]
        expected = [(fitted[-1].world_size, p.world_size) for fitted, held_out in prefixes for p in held_out]
        assert [(row.fitted_to, row.world_size) for row in one.rows] == expected and expected
        assert all(row.world_size > row.fitted_to and row.measured == measured[row.world_size] for row in one.rows)


def test_predictions_do_not_depend_on_the_held_out_measurements(tested, monkeypatch):
    """The measurement of the largest size of each series is changed, which no fit of the back-test sees."""
    largest = {(name, group[-1].world_size) for name, group in group_by_series(load_points()).items()}
    changed = [
        replace(p, tokens_per_s=p.tokens_per_s * (0.5 if (p.series, p.world_size) in largest else 1))
        for p in load_points()
    ]
    monkeypatch.setattr(backtest, "load_points", lambda: changed)
    for row, before in zip(collect_rows(run_backtest()[0]), collect_rows(tested[0]), strict=True):
        halved = (row.series, row.world_size) in largest
        assert row == replace(before, measured=before.measured * (0.5 if halved else 1))


def test_the_bands_hold_what_they_state_and_no_series_is_wrong_and_sure(tested):
    """Coverage over all held-out points, and over those of the series that the first version of the model failed."""
    rows = collect_rows(tested[0])
    answered = [row for row in rows if row.measure is None]
    assert len(rows) == 41 and sum(row.inside for row in rows) >= 0.9 * len(rows)
    assert sum(row.inside for row in answered) >= 0.9 * len(answered) and len(answered) >= 0.75 * len(rows)
    playbook = [row for row in rows if row.series == "Ultra-Scale Playbook DP"]
    assert len(playbook) == 10 and sum(row.inside for row in playbook) >= 9
    assert {row.world_size: row.measure for row in playbook if row.fitted_to == 32} == {64: None, 128: 64, 256: 128}


def test_guesses_without_a_model_keep_the_throughput_of_the_first_and_the_last_fitted_size():
    (one,) = run_backtest("8.05B padded")[0]
    rows = {(r.fitted_to, r.world_size): r for r in one.rows}
    assert rows[8, 16].ideal == pytest.approx(16 * 5990.44) and rows[8, 16].constant == pytest.approx(2 * 31678)
    assert rows[8, 16].residual("constant") == pytest.approx(2 * 31678 / 57172 - 1)


def test_the_documentation_states_the_scores_of_the_back_test(tested):
    """No target: these are the figures that people read. Where they change, docs/parallelism.md has to."""
    text = (ROOT / "docs/parallelism.md").read_text()
    groups = {
        "DDP, GH200": [t for t in tested[0] if t.series in STUDY],
        "DDP, H100": [t for t in tested[0] if t.series == "Ultra-Scale Playbook DP"],
        "FSDP": [t for t in tested[0] if t.method == "fsdp"],
    }
    for name, group in groups.items():
        rows = collect_rows(group)
        answered = [row for row in rows if row.measure is None]
        model, ideal, constant = (score(answered, guess) for guess in ("predicted", "ideal", "constant"))
        figures = [f"{100 * s.median:.1f} %, {100 * s.largest:.1f} %" for s in (model, ideal, constant)]
        counts = f"{len(rows)} | {sum(r.inside for r in rows)} | {len(answered)}"
        assert f"| {counts} | {' | '.join(figures)} |" in text, (name, counts, figures)


def test_text_and_json_agree(tested, capsys):
    assert backtest.main([]) == 0
    text = capsys.readouterr().out
    assert backtest.main(["--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = [row for one in values["series"] for row in one["rows"]]
    assert text.count("OUTSIDE") == sum(not row["inside"] for row in rows)
    assert text.count("; measure ") == sum(row["measure"] is not None for row in rows) > 0
    assert len(rows) == len(collect_rows(tested[0])) and set(values["not_tested"]) == set(tested[1])


def test_with_the_published_sweep_only_its_machines_are_tested():
    found, skipped = run_backtest(sweep=True)
    assert [one.series for one in found] == STUDY
    assert skipped["MPT-7B, batch 6"] == "the published sweep is of another machine or another collective"


def test_a_series_that_is_not_there_gets_its_nearest_name():
    with pytest.raises(UserError, match="did you mean '1.41B padded'"):
        run_backtest("1.41B paded")


def test_neither_torch_nor_scipy_is_needed():
    forbidden = ["torch", "transformers", "scipy", "pydantic", "snakemake", "matplotlib"]
    code = f"import sys\nfor name in {forbidden!r}: sys.modules[name] = None\n"
    code += "from benchmarks import backtest\nimport tokenscale.analysis.projection\nbacktest.main([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
