"""The alpha-beta model of exchanges, against published values and against a ring carried out step by step."""

import numpy as np
import pytest

from tokenscale.base.errors import UserError
from tokenscale.costs.communication import bus_factor, fit_link, hops, solve_nonnegative


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_and_hops_are_those_of_a_ring_that_is_carried_out(ranks):
    """Rank r sends one chunk of N to its neighbour in each turn: N - 1 turns to reduce, N - 1 to gather."""
    size, sent, turns = 840.0, 0.0, 0
    for _half in ("reduce", "gather"):
        for _turn in range(ranks - 1):
            sent, turns = sent + size / ranks, turns + 1
    assert bus_factor("all_reduce", ranks) * size == pytest.approx(sent)
    assert hops("all_reduce", ranks, "ring") == turns


def test_a_tree_is_left_by_fewer_hops_than_a_ring_where_there_are_many_ranks():
    assert hops("all_reduce", 2, "tree") == hops("all_reduce", 2, "ring") == 2
    assert hops("all_reduce", 1024, "tree") == 20 and hops("all_reduce", 1024, "ring") == 2046
    assert hops("all_gather", 1024, "tree") == 1023


def test_nonnegative_least_squares_meets_the_kuhn_tucker_conditions():
    """The gradient is zero where a constant is above zero, and nonnegative elsewhere."""
    random = np.random.default_rng(7)
    bound = 0
    for _ in range(50):
        columns, targets = random.normal(size=(6, 4)), random.normal(size=6)
        found = solve_nonnegative(columns, targets)
        gradient = columns.T @ (columns @ found - targets)
        assert (found >= 0).all() and gradient[found == 0].min(initial=0.0) >= -1e-9
        assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-9
        bound += 0 < (found == 0).sum() < 4
    assert bound > 20


def test_alpha_and_beta_of_a_link_are_recovered_from_a_sweep():
    sizes = [4096 * 4**n for n in range(8)]
    link, residuals = fit_link("all_reduce", sizes, [2e-4 + 5e-11 * size for size in sizes], 2, "tree")
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-4, 5e-11))
    assert residuals == pytest.approx([0] * 8, abs=1e-9)
    with pytest.raises(UserError, match="one message size cannot separate"):
        fit_link("all_reduce", [4096, 4096], [1e-3, 1e-3], 2, "tree")
