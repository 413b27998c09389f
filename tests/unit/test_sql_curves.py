"""Curves of at most so many points: sums over sums in equal parts of a run's useful tokens, held against NumPy."""

import numpy as np
import pandas as pd
import pytest

from tests import tables
from tokenscale.analysis.queries import query


def uneven(folder, count=500, ranks=2, seed=0, **fields):
    """Tables of one run whose steps all differ, and (useful, total, loss_sum, step_s), each [count, ranks]."""
    pick = np.random.default_rng(seed)
    useful = pick.integers(1, 2000, (count, ranks))
    total = useful + pick.integers(0, 500, (count, ranks))
    loss_sum = useful * pick.uniform(1, 9, (count, ranks))
    step_s = pick.uniform(0.1, 0.3, (count, ranks))
    names = ("useful_tokens", "total_tokens", "loss_sum", "step_s")
    values = dict(zip(names, (useful, total, loss_sum, step_s), strict=True)) | fields
    columns = {name: lambda step, rank, held=held: held[step, rank].item() for name, held in values.items()}
    rows = tables.steps("a", count, ranks, **columns)
    tables.write(folder, runs=[tables.run("a", world_size=ranks)], steps=rows)
    return [values[name] for name in names]


@pytest.mark.parametrize(("points", "ranks"), [(1, 3), (7, 1), (100, 3)])
def test_a_point_is_the_steps_that_end_in_its_part(tmp_path, points, ranks):
    useful, total, loss_sum, step_s = uneven(tmp_path, ranks=ranks)
    tokens, losses, seconds = useful.sum(1), loss_sum.sum(1), step_s.max(1)
    seen = np.cumsum(tokens)
    ends = np.searchsorted(seen, np.arange(1, points + 1) * seen[-1] / points, side="right")
    parts = [part for part in np.split(np.arange(len(seen)), ends[:-1]) if len(part)]
    found = query("loss_curves", tmp_path, points=points)
    assert len(found) == len(parts) == points
    assert len(query("loss_curves", tmp_path)) == 100, "where nothing else is asked for"
    assert found["step"].tolist() == [part[-1] for part in parts]
    assert found["steps"].tolist() == [len(part) for part in parts]
    assert found["useful_tokens"].tolist() == [tokens[part].sum() for part in parts]
    assert found["useful_tokens_seen"].tolist() == [seen[part[-1]] for part in parts]
    each = losses / tokens
    expected = {
        "loss": [losses[part].sum() / tokens[part].sum() for part in parts],
        "loss_lowest": [each[part].min() for part in parts],
        "loss_highest": [each[part].max() for part in parts],
        "training_s": [seconds[: part[-1] + 1].sum() for part in parts],
        "total_tokens_per_s": [total[part].sum() / seconds[part].sum() for part in parts],
    }
    for column, values in expected.items():
        assert found[column].tolist() == pytest.approx(values, rel=1e-12), column


def test_a_run_of_no_more_steps_than_points_has_the_losses_of_its_steps_to_the_last_digit(tmp_path):
    uneven(tmp_path, count=100)
    each, curve = query("loss", tmp_path), query("loss_curves", tmp_path)
    assert len(curve) == 100
    pd.testing.assert_frame_equal(curve[each.columns], each, check_exact=True)
    for extreme in ("loss_lowest", "loss_highest"):
        assert curve[extreme].equals(each["loss"].rename(extreme))
    assert len(query("loss_curves", tmp_path, points=99)) < 100


def test_steps_longer_than_a_part_leave_parts_without_a_point(tmp_path):
    useful = np.ones((40, 1), int)
    useful[:4] = 0
    useful[20] = 1000
    uneven(tmp_path, count=40, ranks=1, useful_tokens=useful)
    found = query("loss_curves", tmp_path, points=20)
    assert found["step"].tolist() == [19, 39]
    assert found["steps"].sum() == 40 and found["useful_tokens_seen"].tolist() == [16, 1035]
    uneven(tmp_path, count=40, ranks=1, useful_tokens=0 * useful)
    (point,) = query("loss_curves", tmp_path, points=20).to_dict("records")
    assert (point["step"], point["useful_tokens_seen"]) == (39, 0), "and steps without a useful token have no loss"
    assert all(np.isnan(point[column]) for column in ("loss", "loss_lowest", "loss_highest"))
    tables.write(tmp_path, runs=[tables.run("a")], steps=tables.steps("a", 12))
    ends = [query("loss_curves", tmp_path, points=n)["step"].tolist() for n in (4, 5)]
    assert ends == [[2, 5, 8, 11], [1, 3, 6, 8, 11]], "a step that ends just where a part ends belongs to it"
