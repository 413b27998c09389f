"""Honest noise is no unsteadiness; parts of a run that are slower than the rest: `tests/planted_faults.py`."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tokenscale.analysis import tables
from tokenscale.analysis.expectations import NotCheckedError, Steps
from tokenscale.analysis.steadiness import find_unsteadiness


def find(seconds, tokens=None, world=None):
    n = len(seconds)
    columns = {
        "step": np.arange(n),
        "attempt_step": np.arange(n),
        "world_size": np.ones(n) if world is None else world,
        "step_s": seconds,
        "total_tokens": np.full(n, 1024) if tokens is None else tokens,
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows = [row | {"rank": rank} for row in rows for rank in range(int(row["world_size"]))]
    return find_unsteadiness(SimpleNamespace(steps=Steps(tables.of_rows("steps", rows))))


def noise(n, spread, seed, correlation=0.4):
    """Log times that are heavy-tailed (Student's t with 4 degrees of freedom) and correlated with the step before."""
    random = np.random.default_rng(seed)
    x = random.standard_t(4, n) / math.sqrt(2)
    for k in range(1, n):
        x[k] = correlation * x[k - 1] + math.sqrt(1 - correlation**2) * x[k]
    return np.exp(spread * x)


@pytest.mark.parametrize("n", [12, 24, 200, 5000])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_honest_noise_is_not_found(n, correlation):
    for seed in range(20 if n < 1000 else 3):
        assert find(noise(n, 0.05, seed, correlation)) == []


def test_steps_of_unequal_size_and_world_sizes_are_honest():
    tokens = np.random.default_rng(0).choice([256, 1024, 4096], 60)
    assert find(noise(60, 0.03, 0) * (50 + tokens), tokens) == []
    world = np.repeat([1, 2], 30)
    assert find(noise(60, 0.03, 0) / world, world=world) == []


@pytest.mark.parametrize(("n", "spread", "words"), [(8, 0.01, "fewer than"), (24, 0.6, "vary so much")])
def test_what_cannot_be_decided_is_said(n, spread, words):
    with pytest.raises(NotCheckedError, match=words):
        find(noise(n, spread, 1))
