"""Published points: each with its source, as printed there; the back-test says what their rows say, and saw no more."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tokenscale.analysis import published
from tokenscale.analysis.published import Row, backtest, by_series, facts, fitted_sizes, points, score, words
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.costs.flops import Convention, flops_per_token
from tokenscale.settings.presets import PRESETS

ROOT = Path(__file__).parents[2]
#: the series of the source study that the issue asks for
STUDY = ["1.41B padded", "1.41B pretokenized-padded", "1.41B padding-free", "1.41B token-list", "8.05B padded"]


def test_every_point_says_where_it_is_from_and_is_there_once():
    assert all(p.source and p.tokens_per_s > 0 and p.gpus_per_node > 0 for p in points())
    places = [(p.series, p.world_size) for p in points()]
    assert len(places) == len(set(places)) == 63
    assert all(row["source"] for row in published.all_reduces())


def test_points_of_a_series_differ_in_their_world_size_alone():
    shared = [name for name in published.Published.__dataclass_fields__ if name.startswith(("gpu", "local", "seq"))]
    shared += ["model", "parameters", "method", "approach", "gradient_bytes", "tail_bytes"]
    for name, group in by_series(points()).items():
        for field in shared:
            assert len({getattr(p, field) for p in group}) == 1, (name, field)


def test_corrected_mfu_follows_from_tokens_per_s_and_the_audited_formula():
    presets = {1409353728: PRESETS["llama-1.4b-nemo"], 8053329920: PRESETS["llama-8b-nemo"]}
    corrected = [p for p in points() if p.mfu_corrected_percent is not None]
    assert len(corrected) == 17
    for p in corrected:
        flops = flops_per_token(presets[p.parameters], p.sequence_length, Convention.FULL)
        assert 100 * flops * p.tokens_per_s / p.world_size / 989e12 == pytest.approx(p.mfu_corrected_percent, abs=0.02)
        assert p.mfu_reported_percent > 1.06 * p.mfu_corrected_percent


def test_the_published_all_reduces_give_the_link_that_is_fitted_to_them():
    link = published.link_between()
    assert 4 / link.beta_s_per_byte == pytest.approx(
        78.6e9, rel=0.01
    )  # the four links of a node; printed: 70 at 128 MiB
    for row in published.all_reduces():
        told = 2 * link.alpha_s + link.beta_s_per_byte * int(row["bytes"]) / 4
        assert told == pytest.approx(float(row["seconds"]), rel=0.03)


# -- the back-test


def test_the_table_has_the_rows_of_the_file():
    tested, skipped = backtest()
    groups = by_series(points())
    assert sorted([*(one.series for one in tested), *skipped]) == sorted(groups)
    assert {*STUDY} <= {one.series for one in tested}
    assert set(skipped) & {p.series for p in points() if p.model.startswith(("1.41B", "8.05B"))} == {
        "8.05B pretokenized-padded",
        "8.05B padding-free",
    }
    for one in tested:
        group = groups[one.series]
        assert [(r.world_size, r.measured) for r in one.rows] == [(p.world_size, p.tokens_per_s) for p in group]
        assert [r.world_size for r in one.rows if r.fitted] == one.fit.world_sizes == fitted_sizes(group)
        assert 0 < sum(not r.fitted for r in one.rows)
    (last,) = [r for one in tested if one.series == "1.41B padded" for r in one.rows if r.world_size == 16]
    assert last.measured == 600019.40 and not last.fitted


def test_what_is_predicted_knows_nothing_of_what_it_is_compared_with(monkeypatch):
    before = {one.series: one for one in backtest()[0]}
    unseen = {(one.series, r.world_size) for one in before.values() for r in one.rows if not r.fitted}
    changed = [
        replace(p, tokens_per_s=p.tokens_per_s * (0.5 if (p.series, p.world_size) in unseen else 1)) for p in points()
    ]
    monkeypatch.setattr(published, "points", lambda: changed)
    for one in backtest()[0]:
        for row, was in zip(one.rows, before[one.series].rows, strict=True):
            assert (row.predicted, row.low, row.high) == (was.predicted, was.low, was.high)
            assert (row.perfect, row.kept) == (was.perfect, was.kept)
            assert row.measured == was.measured * (1 if row.fitted else 0.5)


def test_the_guesses_without_a_model_are_those_of_the_first_and_the_last_fitted_size():
    (one,) = backtest("8.05B padded")[0]
    rows = {r.world_size: r for r in one.rows}
    assert rows[16].perfect == pytest.approx(16 * 5990.44) and rows[16].kept == pytest.approx(2 * 31678)
    assert rows[16].residual("kept") == pytest.approx(2 * 31678 / 57172 - 1)


def test_the_readme_says_what_the_model_is_worth():
    """No target: the figures that people read. Where they change, docs/parallelism.md has to."""
    readme, tested = (ROOT / "docs/parallelism.md").read_text(), backtest()[0]
    for method, count in (("ddp", 10), ("fsdp", 13)):
        group = [one for one in tested if one.method == method]
        model, perfect, kept = (score(group, by) for by in ("predicted", "perfect", "kept"))
        inside = sum(row.inside for one in group for row in one.rows if not row.fitted)
        assert model.points == count
        said = [f"{100 * s.median:.1f} %, {100 * s.largest:.1f} %" for s in (model, perfect, kept)]
        assert f"| {count} | {said[0]} | {inside} | {said[1]} | {said[2]} |" in readme


def test_inside_is_between_the_bands_ends():
    row = Row("s", 8, False, 100.0, 104.0, 99.0, 110.0, 120.0, 105.0)
    assert row.inside and row.residual() == pytest.approx(0.04)
    assert not replace(row, measured=98.9).inside and not replace(row, measured=110.1).inside


def test_words_and_json_say_the_same(capsys):
    tested, skipped = backtest()
    text, told = words(tested, skipped), facts(tested, skipped)
    assert "1.41B token-list" in text and "not tested: 8.05B padding-free: world size 1" in text
    outside = [r for one in told["series"] for r in one["rows"] if not r["fitted"] and not r["inside"]]
    assert text.count("OUTSIDE") == len(outside) > 0
    assert told["kind"] == "model" and set(told["scores"]) == {"predicted", "perfect", "kept"}
    assert main(["predict", "--backtest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(told))


def test_with_the_published_sweep_only_its_machines_are_tested(capsys):
    assert main(["predict", "--backtest", "--sweep", "--series", "1.41B padded"]) == 0
    said = capsys.readouterr().out
    assert "of the sweep's exchange exposed" in said and "inside" in said
    tested, skipped = backtest(sweep=True)
    assert [one.series for one in tested] == STUDY
    assert skipped["MPT-7B, batch 6"] == "the published sweep is of another machine or another exchange"


def test_a_series_that_is_not_there_gets_its_nearest_name():
    with pytest.raises(UserError, match="did you mean '1.41B padded'"):
        backtest("1.41B paded")


def test_the_files_are_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tokenscale"]
    files = sorted((ROOT / "src/tokenscale/analysis/published").iterdir())
    names = [path.relative_to(ROOT / "src/tokenscale").as_posix() for path in files]
    assert names == ["analysis/published/all_reduce.csv", "analysis/published/steps.csv"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in names)


def test_neither_torch_nor_scipy_is_needed():
    forbidden = ["torch", "transformers", "scipy", "pydantic", "snakemake", "matplotlib"]
    code = f"import sys\nfor name in {forbidden!r}: sys.modules[name] = None\n"
    code += (
        "from tokenscale.cli.main import main\nimport tokenscale.analysis.projection\nmain(['predict', '--backtest'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_series_whose_sizes_all_go_into_the_fit_is_not_tested():
    group = by_series(points())["8.05B padded"][:3]
    assert fitted_sizes(group) == [1, 4, 8]
    assert "none is left to test" in published.untestable(group)


def test_nothing_is_no_more_than_nothing():
    assert (published._percent(-1e-9), published._percent(-0.0006)) == ("+0.0 %", "-0.1 %")
