"""Values of a run against each other, from rows alone."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from tokenscale.analysis.steps import Steps
from tokenscale.referee import clocks, run_values

CORPORA = ("prose", "code")


def list_sums(change=lambda rows: None, mixture=True) -> list[str]:
    """Return what is said of the validations of a run after `change(rows)`."""
    rows = []
    for step in (0, 8):
        parts = [
            {
                "event": "source_validation",
                "attempt": 0,
                "step": step,
                "corpus": corpus,
                "rows": 4,
                "useful_tokens": 200 + len(corpus),
                "correct_tokens": 20 - step,
                "loss_sum": 0.1 + 1000.7 / (1 + step) + len(corpus),
                "duration_s": 0.2,
            }
            for corpus in CORPORA
        ]
        rows += parts
        whole = {"event": "validation", "attempt": 0, "step": step, "corpus": None}
        for name in ("rows", "useful_tokens", "correct_tokens", "loss_sum"):
            whole[name] = parts[1][name] + parts[0][name]
        rows.append(whole | {"duration_s": 0.4})
    change(rows)
    evidence = SimpleNamespace(
        own=SimpleNamespace(mixture=SimpleNamespace(names=list(CORPORA)) if mixture else None),
        named=lambda event: [row for row in rows if row["event"] == event],
    )
    return list(run_values._find_other_sums(evidence))


def put(place: int, **fields):
    return lambda rows: rows[place].update(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(4, loss_sum=116.3), "the validation at step 8 has loss_sum"),
        (put(5, loss_sum=223.0), "the validation at step 8 has loss_sum"),
        (put(1, useful_tokens=203), "the validation at step 0 has useful_tokens 409"),
        (put(2, rows=9), "the validation at step 0 has rows 9"),
        (put(3, correct_tokens=11), "the validation at step 8 has correct_tokens 24"),
        (put(3, duration_s=0.3), "the validation at step 8 took 0.4 s, those of its corpora 0.5 s"),
        (put(5, duration_s=1.0), "the validation at step 8 took 1 s, those of its corpora 0.4 s"),
        (put(3, corpus="code"), "step 8 is of corpora code, code, expected code, prose"),
        (lambda rows: rows.pop(3), "step 8 is of corpora code, expected code, prose"),
        (lambda rows: rows.append(dict(rows[3])), "step 8 is of corpora code, prose, prose"),
    ],
)
def test_validations_of_corpora_add_up(change, words):
    assert list_sums() == []
    (sentence,) = list_sums(change)
    assert words in sentence
    assert list_sums(change, mixture=False) == []


def test_a_validation_that_nobody_counted_accuracy_in_has_none_to_add():
    def forget(rows):
        for row in rows:
            row["correct_tokens"] = None

    assert list_sums(forget) == []


def test_validations_of_corpora_of_a_killed_attempt_are_no_part_of_the_next_one():
    def repeat(rows):
        rows += [rows[3] | {"attempt": 1}]

    assert list_sums(repeat) == []


def make_evidence(rows: list[dict], **fields) -> SimpleNamespace:
    """Evidence of these rows of steps, of one attempt and the ranks that they name."""
    names = ("step", "rank", "world_size", "t_mono_s", *run_values.OF_ALL_RANKS)
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns["attempt"] = [0] * len(rows)
    steps = Steps(pa.table(columns))
    return SimpleNamespace(own=None, steps=steps, raw=steps, **fields)


def list_ranks(**changed) -> list[str]:
    """Return what is said of three ranks that log equal values, but for those of rank 1 at step 2."""
    rows = []
    for rank in range(3):
        for step in range(4):
            row = {"step": step, "rank": rank, "world_size": 3, "grad_norm": 1.5 + step}
            row |= {"grad_norm_clipped": 1.0, "learning_rate": 1e-3, "skipped": False}
            rows.append(row | (changed if (rank, step) == (1, 2) else {}))
    return list(run_values._find_other_ranks(make_evidence(rows)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"grad_norm": 3.5 * (1 + 1e-9)}, ""),
        ({"grad_norm": 3.4}, "grad_norm is 3.4 at step 2, expected 3.5 (1 of 12 rows)"),
        ({"grad_norm": 3.6}, "grad_norm is 3.5 at step 2, expected 3.6 (2 of 12 rows)"),
        ({"grad_norm": None}, "grad_norm is nan at step 2"),
        ({"grad_norm_clipped": 0.9}, "grad_norm_clipped is 0.9 at step 2, expected 1"),
        ({"learning_rate": 2e-3}, "learning_rate is 0.001 at step 2, expected 0.002"),
        ({"skipped": True}, "skipped is 0 at step 2, expected 1"),
    ],
)
def test_ranks_log_the_same_of_a_global_batch(changed, words):
    found = list_ranks(**changed)
    assert any(words in text for text in found) if words else found == []


def list_clocks(late_s=0.0, ready_s=0.0, other_boot=False) -> list[str]:
    """Return what is said of the clocks of two ranks with steps of 1 s, of which rank 1 ends step 2
    and begins the first one late.
    """
    rows = [
        {
            "step": step,
            "rank": rank,
            "world_size": 2,
            "t_mono_s": 11.0 + step + (late_s if (rank, step) == (1, 2) else 0.001 * rank),
        }
        for rank in range(2)
        for step in range(4)
    ]
    events = []
    for rank in range(2):
        event = {"attempt": 0, "rank": rank, "t_mono_s": 10.0 + ready_s * rank}
        boot = f"boot {rank * other_boot}"
        events.append(event | {"event": "run_start", "boot": boot})
        events.append(event | {"event": "init_done", "boot": None})
    return list(clocks._find_ranks_apart(make_evidence(rows, events=events)))


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        ({}, ""),
        ({"late_s": 0.99}, ""),
        ({"late_s": 1.02}, "a rank ended step 3 0.02 s before another one had ended step 2"),
        ({"ready_s": 0.99}, ""),
        ({"ready_s": 1.5}, "a rank ended step 0 0.5 s before another one had started"),
        ({"late_s": 50.0, "other_boot": True}, ""),
    ],
)
def test_no_rank_is_a_step_ahead_of_another(clock, words):
    found = list_clocks(**clock)
    assert any(words in text for text in found) if words else found == []
