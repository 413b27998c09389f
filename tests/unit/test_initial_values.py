"""Initial values: normal, independent, and the same in any part that is made alone."""

import hashlib
import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest
import torch

from tokenscale.settings.presets import PRESETS
from tokenscale.train.models import initial_values
from tokenscale.train.models.decoder import Decoder, initialise, initialise_part
from tokenscale.train.models.initial_values import fill_normal

NORMAL = NormalDist()
#: a correlation of n independent pairs is below this in all but one of 10⁷ tests
FIVE_SIGMA = 5.3


def normal(seed=0, name="blocks.0.attention.query.weight", shape=(1024, 1024)):
    values = torch.empty(shape)
    fill_normal(values, seed, name, 1.0, (0, 0), shape)
    return values


@pytest.mark.parametrize("shape", [(64, 48), (37, 97), (5, 1), (1, 300)])
def test_a_part_is_the_part_of_the_whole(monkeypatch, shape):
    """Rows, columns from even and odd ones on, single elements; made in one go or in many."""
    whole = normal(3, "weight", shape)
    pick = np.random.default_rng(0)
    for chunk in (1 << 17, 64, 1):
        monkeypatch.setattr(initial_values, "CHUNK", chunk)
        for _ in range(20):
            begin = [int(pick.integers(0, n)) for n in shape]
            end = [int(pick.integers(b + 1, n + 1)) for b, n in zip(begin, shape, strict=True)]
            part = torch.full([e - b for b, e in zip(begin, end, strict=True)], torch.nan)
            fill_normal(part, 3, "weight", 1.0, begin, shape)
            assert torch.equal(part, whole[begin[0] : end[0], begin[1] : end[1]])
    none = torch.empty(0, shape[1])
    fill_normal(none, 3, "weight", 1.0, (shape[0], 0), shape)  # more ranks than rows


def test_other_memory_and_formats_get_the_same_values():
    whole = normal(shape=(64, 48))
    inside = torch.zeros(64, 96)
    fill_normal(inside[:, 1:49], 0, "blocks.0.attention.query.weight", 1.0, (0, 0), (64, 48))
    assert torch.equal(inside[:, 1:49], whole) and (inside[:, 49:] == 0).all()
    half = torch.empty(64, 48, dtype=torch.bfloat16)
    fill_normal(half, 0, "blocks.0.attention.query.weight", 1.0, (0, 0), (64, 48))
    assert torch.equal(half, whole.bfloat16())


def test_a_decoders_parts_are_those_of_the_whole_model():
    model = Decoder(PRESETS["gpt2-micro"].with_vocabulary(2000), 32)
    initialise(model, 7)
    scaled = (2 * model.settings.layers) ** -0.5
    for name, weight in model.state_dict().items():
        if name == "head.weight":  # the embedding
            continue
        part = torch.full((len(weight) - 3, *weight.shape[1:]), torch.nan)
        offsets = (2, *(0,) * (weight.dim() - 1))
        initialise_part(model.settings, 7, name, part, offsets, tuple(weight.shape))
        assert torch.equal(part, weight[2:-1]), name
        if weight.dim() == 2:
            share = scaled if name.endswith(("output.weight", "down.weight")) else 1.0
            error = FIVE_SIGMA / (2 * weight.numel()) ** 0.5
            assert weight.std() == pytest.approx(
                model.settings.initial_deviation * share, rel=error
            ), name


def test_rows_are_those_of_jumped_streams_and_values_stay_what_they_are():
    """Bit for bit: checkpoints of this seed and these names begin here."""
    found = normal(5, "head.weight", (300, 97)).numpy()
    key = int.from_bytes(hashlib.sha256(b"5/head.weight").digest()[:16], "little")
    for row in (0, 1, 299):
        stream = np.random.Philox(key=key).jumped(row)
        drawn = np.random.Generator(stream).standard_normal(97)
        assert np.array_equal(found[row], drawn.astype(np.float32))
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "a01bf395979aaf37"


def test_values_are_normal():
    """Moments, and the share of values in 200 intervals that are equally likely, within five
    standard errors.
    """
    values = normal().flatten().double().numpy()
    count = values.size
    for power, (moment, variance) in {
        1: (0, 1),
        2: (1, 2),
        3: (0, 15),
        4: (3, 96),
        6: (15, 10170),
    }.items():
        assert abs((values**power).mean() - moment) < FIVE_SIGMA * (variance / count) ** 0.5, power
    borders = [NORMAL.inv_cdf(k / 200) for k in range(1, 200)]
    shares = np.bincount(np.searchsorted(borders, values), minlength=200)
    chi_square = ((shares - count / 200) ** 2).sum() / (count / 200)
    assert abs(chi_square - 199) < FIVE_SIGMA * (2 * 199) ** 0.5


def test_values_are_independent():
    one = normal()
    pairs = {
        "next column": (one[:, :-1], one[:, 1:]),
        "next row": (one[:-1], one[1:]),
        "diagonal": (one[:-1, :-1], one[1:, 1:]),
        "transposed": (one.triu(1), one.T.triu(1)),
        "parameter": (one, normal(name="blocks.1.attention.query.weight")),
        "seed": (one, normal(seed=1)),
        "seed and parameter": (one, normal(seed=10, name="blocks.0.attention.key.weight")),
    }
    for name, (a, b) in pairs.items():
        for f in (lambda x: x, torch.abs, torch.square):
            x = f(a).double().flatten()
            y = f(b).double().flatten()
            if name == "transposed":
                kept = a.flatten() != 0
                x = x[kept]
                y = y[kept]
            correlation = torch.corrcoef(torch.stack((x, y)))[0, 1].item()
            assert abs(correlation) < FIVE_SIGMA / len(x) ** 0.5, name


def test_numbers_are_drawn_in_parts(monkeypatch):
    """As many as a thread draws at once, in fp32, and a row in fp64; torch's memory is not traced."""
    monkeypatch.setattr(initial_values, "CHUNK", 1 << 14)
    into = torch.empty(1 << 14, 64)
    tracemalloc.start()
    fill_normal(into, 0, "weight", 1.0, (0, 0), into.shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parts = torch.get_num_threads() * (4 * initial_values.CHUNK + 8 * 64)
    assert peak < 2 * parts + 200_000 < into.nbytes / 4
