"""Runs against each other, from rows alone."""

import math
from types import SimpleNamespace

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from tokenscale.referee import siblings as of_runs
from tokenscale.referee.siblings import OF_A_SHAPE, SHAPE_SPREADS, _find_other_cuts

STORE = {
    "corpus": "web",
    "tokenizer": "bpe",
    "sequence_length": 128,
    "format": "padded",
    "split": "train",
    "cut_tokens": 400,
    "document_tokens": 1010,
    "documents": 10,
}


@pytest.mark.parametrize(
    ("counted", "stored", "accused"),
    [
        ([0.4, 0.4, 0.4], True, []),
        ([0.41, 0.41, 0.41], True, []),  # of a sample
        ([0.41, 0.41, 0.4101], False, [2]),
        ([0.5, 0.5, 0.5], True, [0, 1, 2]),
        ([0.5, 0.5, 0.5], False, []),
        ([None, None, None], True, []),
    ],
)
def test_a_share_of_cut_text_is_that_of_other_runs_and_of_the_padded_store(
    counted, stored, accused
):
    rows = {
        str(number): {
            "corpus": "web",
            "tokenizer": "bpe",
            "sequence_length": 128,
            "text_cut": None if share is None else f'{{"web":{share}}}',
        }
        for number, share in enumerate(counted)
    }
    siblings = SimpleNamespace(
        rows=rows,
        stores={"sha": STORE} if stored else {},
        groups=lambda *columns: [[*rows]],
    )
    assert [int(run) for run, _ in _find_other_cuts(siblings)] == accused


@hypothesis.given(
    least=st.integers(1, 64),
    steps=st.integers(1, 40),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 0.8]),
)
def test_useful_tokens_are_those_of_rows_drawn_from_the_store_whatever_the_rows_are(
    least, steps, seed, scale
):
    """Rows of `least` to 64 useful tokens of 64, of which a run draws eight a step."""
    random = np.random.default_rng(seed)
    useful = np.append(random.integers(least, 65, 339), 63)
    drawn = random.permutation(useful)[: 8 * steps].reshape(steps, 8).sum(axis=1)
    row = {"store_sha256": "sha", "objective": "causal", "labels": "all", "approach": "packed"}
    siblings = SimpleNamespace(
        rows={"run": row | {"global_batch": 8, "sequence_length": 64}},
        stores={
            "sha": {"format": "packed", "useful_tokens": useful.sum(), "total_tokens": 64 * 340}
        },
        counts={"run": np.outer(scale * drawn, [0, 0, 1, 0, 0])},
    )
    found = [*of_runs._find_other_shares(siblings)]
    assert not (found and scale == 1)
    assert found or scale == 1 or steps * (least - 50) < 100


def find_other_shapes(cells: list[list[float]], quantity: str) -> list[str]:
    """Return the runs that are named; run `c r` is repeat r of cell c."""
    values = {f"{c} {r}": value for c, runs in enumerate(cells) for r, value in enumerate(runs)}
    rows = {run: {"approach": "packed", "series": run.split()[0]} for run in values}
    siblings = SimpleNamespace(
        rows=rows,
        of_a_shape={quantity: values},
        groups=lambda *columns: [[*rows]],
    )
    return [run for run, _ in of_runs._find_other_shape(siblings, quantity)]


@hypothesis.given(
    quantity=st.sampled_from([*OF_A_SHAPE]),
    repeats=st.integers(4, 9),
    noise=st.floats(0, 0.01),
    times=st.floats(1, 3),
    up=st.booleans(),
)
def test_a_run_is_named_where_it_leaves_its_repeats_by_more_than_the_limit(
    quantity, repeats, noise, times, up
):
    runs = [math.exp(noise * (-1) ** r) for r in range(repeats)]
    beyond = max(math.log(OF_A_SHAPE[quantity][0]), SHAPE_SPREADS * 1.6 * noise) + 1.5 * noise
    assert find_other_shapes([runs], quantity) == []
    runs[1] = math.exp((1 if up else -1) * (beyond * times + 1e-9))
    assert find_other_shapes([runs], quantity) == ["0 1"]


@pytest.mark.parametrize("quantity", OF_A_SHAPE)
def test_an_approach_is_named_where_it_leaves_the_others(quantity):
    limit = OF_A_SHAPE[quantity][1]
    cells = [[1.0] * 3, [1.0] * 3, [min(limit, 1e6) * 1.01] * 3]
    named = ["2 0", "2 1", "2 2"] if limit < math.inf else []
    assert find_other_shapes(cells, quantity) == named


def stop(attempt: int, rank: int, cpu_s: float | None) -> list[dict]:
    names = {"attempt": attempt, "rank": rank}
    return [
        names | {"event": "init_done", "t_mono_s": 10.0 * attempt, "cpu_s": None},
        names | {"event": "run_stop", "t_mono_s": 10.0 * attempt + 4.0, "cpu_s": cpu_s},
    ]


@pytest.mark.parametrize(
    ("events", "share"),
    [
        (stop(0, 0, 8.0), 2.0),
        (stop(0, 0, 8.0) + stop(0, 1, 4.0), 1.5),
        (stop(0, 0, 8.0) + stop(1, 0, 2.0), 0.5),  # the newest attempt
        (stop(0, 0, None), None),
        (stop(0, 0, 8.0)[1:], None),
    ],
)
def test_the_processor_time_of_a_second_is_that_of_all_ranks(events, share):
    assert of_runs._measure_processor_time(events) == share


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("approach", ["packed", "own.Loader"])
@pytest.mark.parametrize("column", [None, 0, 1, 2])
def test_runs_of_one_seed_and_equal_order_digests_have_equal_samples(seed, approach, column):
    """Losses that an own approach shares with the one whose batches it makes are no copies."""
    runs = of_runs.Siblings()
    for name, of in (("a", {"seed": 0, "approach": "packed"}), ("b", {"approach": approach})):
        runs.rows[name] = {"seed": seed, "storage": "", **of}
        runs.counts[name] = np.arange(20.0).reshape(4, 5)
    if column is not None:
        runs.counts["b"][3, column] += 1
    runs.counts["b"][:, 3:] += 1  # losses and norms
    equal = seed == 0 and (approach == "packed" or column is None)
    assert runs.have_equal_samples("a", "b") == equal


def find_outlying_losses(validated: list[float], trained: list[float]) -> list[str]:
    """Return the runs that are named, for losses of one cell's runs in the validation at step 8 and
    in the training steps near it.
    """
    runs = [str(number) for number in range(len(validated))]
    siblings = of_runs.Siblings()
    siblings.validated[8] = dict(zip(runs, validated, strict=True))
    siblings.nearby[8] = dict(zip(runs, trained, strict=True))
    siblings.groups = lambda *columns: [runs]
    return [run for run, _ in of_runs._find_outlying_losses(siblings)]


@hypothesis.given(
    repeats=st.integers(6, 9),
    noise=st.floats(0, 0.004),
    times=st.floats(1, 8),
    up=st.booleans(),
)
def test_a_validation_is_named_where_repeats_and_the_training_near_it_contradict(
    repeats, noise, times, up
):
    losses = [4 * math.exp(noise * (-1) ** r) for r in range(repeats)]
    assert find_outlying_losses(losses, losses) == []
    factor = math.exp((1 if up else -1) * times * (0.03 + 12 * noise))
    altered = [losses[0] * factor, *losses[1:]]
    assert find_outlying_losses(altered, trained=losses) == ["0"]
    # a spike: the run's training says the same
    assert find_outlying_losses(altered, trained=altered) == []


def test_the_training_near_a_validation_is_that_of_its_own_run():
    runs, steps = np.repeat(["a", "b"], 100), np.tile(np.arange(100), 2)
    losses = np.where(runs == "a", 1.0, 2.0) + np.where(steps < 40, 0.0, 4.0)
    numbers = (runs == "b") * of_runs.STEP_SPAN + steps
    sums = np.column_stack([3 * losses, np.full(200, 3.0)])
    sums[130] = math.inf, 3.0
    at = pa.table({"run_id": ["a", "b", "b", "c"], "step": [20, 40, 100, 20]})
    siblings = of_runs.Siblings()
    siblings._add_nearby_losses(numbers, sums, names=["a", "b"], validations=at)
    near = {(step, run): loss for step, of in siblings.nearby.items() for run, loss in of.items()}
    assert near == {
        (20, "a"): 1.0,
        (40, "b"): pytest.approx((15 * 2 + 16 * 6) / 31),
        (100, "b"): 6.0,
    }


def make_siblings(counts: list[list[int]], tokens: list[int | None]) -> SimpleNamespace:
    """Runs of equal settings, with the order digests of their steps and what they validated on."""
    rows = {str(i): {"validation_tokens": value} for i, value in enumerate(tokens)}
    return SimpleNamespace(
        rows=rows,
        counts={
            str(i): np.array([[step, digest, 0, 0, 0] for step, digest in enumerate(digests)])
            for i, digests in enumerate(counts)
        },
        family=lambda run_id: "packed",
        groups=lambda *columns: [[*rows]],
    )


@pytest.mark.parametrize(
    ("counts", "accused"),
    [
        ([[5, 6, 7]], []),
        ([[5, 6, 7], [5, 6, 7], [5, 6]], []),
        ([[5, 6, 7], [5, 9, 7], [5, 6, 7]], ["1"]),
        ([[5, 6, 7], [5, 6, 8]], ["0", "1"]),  # which of two is wrong nobody knows
    ],
)
def test_runs_of_one_seed_read_their_samples_in_one_order(counts, accused):
    found = of_runs._find_other_orders(make_siblings(counts, tokens=[None] * len(counts)))
    assert [run for run, _ in found] == accused


@pytest.mark.parametrize(
    ("tokens", "accused"),
    [
        ([None, None], []),
        ([100, 100, None], []),
        ([100, 101, 100], ["1"]),
        ([100, 101], ["0", "1"]),
    ],
)
def test_runs_validate_on_as_many_tokens_of_the_same_rows(tokens, accused):
    found = of_runs._find_other_validation_tokens(make_siblings([], tokens))
    assert [run for run, _ in found] == accused


@pytest.mark.parametrize(
    ("bytes_of_runs", "accused"),
    [
        ([16e9, 16e9, None], []),
        ([16e9, 16e9, 16.06e9], []),
        ([16e9, 16e9, 16.1e9], ["2"]),
        ([16e9, 16e9, 15.9e9], ["2"]),
    ],
)
def test_a_machine_with_other_memory_is_named(bytes_of_runs, accused):
    rows = {str(i): {"machine_memory_bytes": value} for i, value in enumerate(bytes_of_runs)}
    siblings = SimpleNamespace(rows=rows, times={})
    assert [run for run, _ in of_runs._find_other_machines(siblings)] == accused


@pytest.mark.parametrize(
    ("losses", "rounded", "accused"),
    [
        ([8.0, 8.0, 8.0], [], []),
        ([8.0, 8.0, 8.001], [], ["2"]),
        ([8.0, 8.0, 8.001], [2], []),  # its gradients are rounded to bf16
        ([8.0, 8.001], [1], []),
        ([8.0, 8.001], [], ["0", "1"]),
        ([8.0, 8.1], [1], ["1"]),
        ([8.001, 8.001, 8.0], [0, 1], []),  # most are rounded, and no measure of the exact one
    ],
)
def test_losses_of_equal_samples_are_equal_within_the_rounding_of_each(losses, rounded, accused):
    rows = {
        str(i): {"precision": "fp32", "compression": "bf16" if i in rounded else "none"}
        for i in range(len(losses))
    }
    siblings = SimpleNamespace(
        rows=rows,
        contradicting=set(),
        counts={str(i): np.array([[0, 5, 9, loss, 1.0]]) for i, loss in enumerate(losses)},
        family=lambda run_id: "packed",
        groups=lambda *columns: [[*rows]],
    )
    assert [run for run, _ in of_runs._find_other_losses_of_samples(siblings)] == accused


@pytest.mark.parametrize(("step", "rounded", "named"), [(0, True, 1), (3, True, 0), (3, False, 2)])
def test_norms_of_rounded_gradients_are_compared_at_equal_weights(step, rounded, named):
    formats = ["none", "bf16" if rounded else "none"]
    rows = {str(i): {"precision": "fp32", "compression": formats[i]} for i in range(2)}
    siblings = SimpleNamespace(
        rows=rows,
        contradicting=set(),
        counts={str(i): np.array([[step, 5, 9, 8.0, 3.0 + i]]) for i in range(2)},
        family=lambda run_id: "packed",
        groups=lambda *columns: [[*rows]],
    )
    found = list(of_runs._find_other_losses_of_samples(siblings))
    assert len(found) == named
