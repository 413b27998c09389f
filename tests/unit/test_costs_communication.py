"""The alpha-beta model of exchanges, against published values and against a ring carried out step by step."""

import math

import pytest

from tokenscale.costs.communication import (
    COLLECTIVES,
    Link,
    bus_factor,
    collective_s,
    expected_maximum,
    hops,
    split_hierarchy,
)


@pytest.mark.parametrize("ranks, published", [(2, 0.56419), (5, 1.16296), (10, 1.53875), (20, 1.86748), (100, 2.50759)])
def test_the_slowest_of_n_ranks_lies_where_tables_of_order_statistics_have_it(ranks, published):
    assert expected_maximum(ranks) == pytest.approx(published, abs=1e-5)


def test_the_slowest_rank_stays_below_the_bound_for_every_world_size():
    values = [expected_maximum(2**n) for n in range(11)]
    assert values[0] == 0 and values == sorted(values)
    assert all(value < math.sqrt(2 * math.log(2**n)) for n, value in enumerate(values) if n)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_and_hops_are_those_of_a_ring_that_is_carried_out(ranks):
    """Rank r sends one chunk of N to its neighbour in each turn: N - 1 turns to reduce, N - 1 to gather."""
    size, sent, turns = 840.0, 0.0, 0
    for _half in ("reduce", "gather"):
        for _turn in range(ranks - 1):
            sent, turns = sent + size / ranks, turns + 1
    assert bus_factor("all_reduce", ranks) * size == pytest.approx(sent)
    assert hops("all_reduce", ranks, "ring") == turns


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks):
    link = Link(alpha_s=3e-5, beta_s_per_byte=2e-10)
    whole, *halves = (collective_s(name, 1e7, ranks, link) for name in COLLECTIVES)
    assert whole == pytest.approx(sum(halves))


def test_a_tree_is_left_by_fewer_hops_than_a_ring_where_there_are_many_ranks():
    assert hops("all_reduce", 2, "tree") == hops("all_reduce", 2, "ring") == 2
    assert hops("all_reduce", 1024, "tree") == 20 and hops("all_reduce", 1024, "ring") == 2046
    assert hops("all_gather", 1024, "tree") == 1023


@pytest.mark.parametrize("ranks, per_node, expected", [(1, 4, (1, 1)), (4, 4, (4, 1)), (5, 4, (4, 2)), (9, 1, (1, 9))])
def test_ranks_fill_a_node_before_the_next(ranks, per_node, expected):
    assert split_hierarchy(ranks, per_node) == expected
