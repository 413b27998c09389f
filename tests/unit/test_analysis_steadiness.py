"""Parts of a run that are slower than the rest are found, at any place and length; honest noise is not."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tokenscale.analysis import tables
from tokenscale.analysis.expectations import NotCheckedError, Steps
from tokenscale.analysis.steadiness import find_unsteadiness

#: kind → is step k of n slowed?
KINDS = {
    "first third": lambda k, n: k < n / 3,
    "middle third": lambda k, n: n / 3 <= k < 2 * n / 3,
    "last third": lambda k, n: k >= 2 * n / 3,
    "every third": lambda k, n: k % 3 == 0,
    "every second": lambda k, n: k % 2 == 0,
    "two thirds": lambda k, n: k >= n / 3,
    "three steps": lambda k, n: n // 2 <= k < n // 2 + 3,
    "one step": lambda k, n: k == n // 2,
}
#: kind → smallest ratio that is found in 24 and in 200 steps, by spread of the log times; other kinds: as `PARTS`
PARTS = {0.03: (1.4, 1.3), 0.06: (2.0, 1.7)}
SHORT = {"three steps": (2.0, 25.0), "one step": (8.0, 64.0)}


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


def is_found(seconds):
    try:
        return bool(find(seconds))
    except NotCheckedError:
        return False


def found_share(kind, n, ratio, spread):
    slowed = np.array([ratio if KINDS[kind](k, n) else 1.0 for k in range(n)])
    return np.mean([is_found(slowed * noise(n, spread, seed)) for seed in range(7)])


@pytest.mark.parametrize("spread", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_slow_steps_are_found_wherever_they_lie(kind, spread):
    for n, smallest in zip((24, 200), SHORT.get(kind, PARTS[spread]), strict=True):
        for ratio in (smallest, 8 * smallest):
            assert found_share(kind, n, ratio, spread) > 0.8, (n, ratio)


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
