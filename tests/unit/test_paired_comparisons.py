"""What stands beside a verdict on pairs of runs: drift, order, suspect runs, unequal updates, and
what is left out.
"""

import numpy as np
import pandas as pd
import pytest

from tokenscale.report.paired_comparisons import answers, comparison_table, comparisons

CELLS = {"packed": "approach=packed", "padded": "approach=padded"}
PRIMARY = {
    "of": CELLS["packed"],
    "over": CELLS["padded"],
    "names": list(CELLS.values()),
    "at": "",
    "factor": "approach",
    "quantity": "useful_tokens_per_s",
}
# A is packed; the letters are runs in order of their starts
ABBA = "ABBAABBAABBA"
LAST = "BBBBBBAAAAAA"


def campaign(order=ABBA, ratio=1.0, drift=0.0, validity=None):
    """Rows of `throughput` and `inventory`: noise of 0.3 %, a drift by that share to the last
    run.
    """
    random = np.random.default_rng(1)
    repeats = {"A": 0, "B": 0}
    rows = []
    for place, letter in enumerate(order):
        name = "packed" if letter == "A" else "padded"
        rate = (
            (ratio if letter == "A" else 1.0)
            * np.exp(0.003 * random.normal())
            * (1 + drift * place / len(order))
        )
        rows.append(
            {
                "run_id": f"{name}-{repeats[letter]}",
                "approach": name,
                "series": name,
                "cell": CELLS[name],
            }
            | {
                "repeat": repeats[letter],
                "useful_tokens_per_s": rate,
                "started_unix_s": 100.0 * place,
            }
        )
        repeats[letter] += 1
    runs = pd.DataFrame(rows).assign(
        factors="",
        storage="",
        layout="",
        world_size=1,
        external=False,
        seed=lambda r: r["repeat"],
        science="s",
        code_digest="c",
        steps_asked=24,
        global_batch=8,
        sequence_length=256,
        validity="valid",
        reasons="",
        versions=None,
        arm=None,
    )
    for run_id, (word, reason) in (validity or {}).items():
        runs.loc[runs["run_id"] == run_id, ["validity", "reasons"]] = word, reason
    return runs[runs["validity"].isin(["valid", "suspect"])].drop(columns="started_unix_s"), runs


def answer(throughput, runs, *frames, **changes):
    compared, _ = comparisons(throughput, runs, [PRIMARY | changes], *frames)
    return answers(compared)[0]


@pytest.mark.parametrize(
    ("order", "ratio", "drift", "verdict"),
    [
        (ABBA, 1.2, 0.0, "faster"),
        (ABBA, 1.2, 0.25, "faster, with drift"),
        (ABBA, 1.0, 0.25, "no difference shown, with drift"),
        (LAST, 1.0, 0.25, "no verdict: drift"),
        (LAST, 1.0, -0.25, "no verdict: drift"),
        (LAST, 0.8, -0.1, "slower, with drift"),
        ("BABABABABABA", 1.0, 0.25, "no verdict: drift"),
        # hidden by the drift: no equivalence
        ("BABABABABABA", 1 / 1.025, 0.25, "no verdict: drift"),
        ("ABBAABBAAB", 1.2, 0.25, "too few runs"),
    ],
)
def test_a_verdict_is_not_what_drift_makes(order, ratio, drift, verdict):
    found = answer(*campaign(order, ratio, drift))
    assert found["verdict"] == verdict, found
    assert (
        "throughput drifted by" in found["spread"] and "ran first in" in found["spread"]
    ) is bool(drift)


@pytest.mark.parametrize(
    ("drift", "later", "verdict"),
    [
        (-0.25, ["packed-5", "padded-5"], "faster, with drift"),
        (0.25, ["packed-5", "padded-5"], "faster, with drift"),
        (-0.25, ["packed-5"], "no verdict: drift"),
    ],
)
def test_a_drift_of_minutes_is_not_drawn_on_over_months(drift, later, verdict):
    """By e²⁰⁰⁰ where a pair, or one of its runs, was made months after the others."""
    throughput, runs = campaign(ABBA, 1.2, drift)
    runs.loc[runs["run_id"].isin(later), "started_unix_s"] += 1e7
    found = answer(throughput, runs)
    assert found["verdict"] == verdict, found
    assert ("more than 100\u202f000 %" in found["spread"]) is (drift > 0)


@pytest.mark.parametrize(
    ("order", "canary", "said"),
    [(ABBA, False, False), (ABBA + "ABBA", False, True), ("A" + ABBA + "ABBA", True, False)],
    ids=["six pairs", "eight pairs", "behind a canary"],
)
def test_a_first_run_that_follows_no_other_is_named_where_it_is_in_a_pair(order, canary, said):
    frames = campaign(order, 1.2)
    for rows in frames if canary else ():
        rows.loc[rows["run_id"] == "packed-0", "repeat"] = 99  # in no pair
    assert ("follows no other: no canary" in answer(*frames)["spread"]) is said


@pytest.mark.parametrize(
    ("designs", "verdict"),
    [
        ([None] * 12, "faster"),
        (["one"] * 12, "faster"),
        (["one"] * 10 + ["two"] * 2, "too few runs"),
        (["one"] * 12 + ["two"] * 4, "faster"),
    ],
)
def test_repeats_that_were_added_after_a_look_are_another_look(designs, verdict):
    """p is 0.031 of six pairs and 0.008 of eight, and is multiplied by four at the second look."""
    throughput, runs = campaign((ABBA + "ABBA")[: len(designs)], 1.2)
    found = answer(throughput, runs.assign(design_sha256=designs))
    assert found["verdict"] == verdict
    assert ("looked at 2 times" in found["spread"]) is ("two" in designs)


@pytest.mark.parametrize(
    ("order", "pairs", "spread"), [("AA", 0, False), ("AB", 1, False), ("ABBA", 2, True)]
)
def test_no_spread_is_shown_of_a_single_pair_or_of_none(order, pairs, spread):
    compared, _ = comparisons(*campaign(order), [PRIMARY])
    table = comparison_table(compared)
    shown = dict(zip(dict(table.columns), table.rows[0], strict=True))
    assert ("–" in answers(compared)[0]["spread"]) == ("–" in shown.get("spread", "")) == spread, (
        shown
    )
    assert answers(compared)[0]["spread"].startswith(f"{pairs} pair") is not spread


@pytest.mark.parametrize(
    ("suspect", "verdict"),
    [
        (["packed-0"], "faster, with suspect runs"),
        (["packed-0", "padded-0"], "faster, with suspect runs"),  # one pair
        (["packed-0", "padded-1"], "faster, with suspect runs"),
        ([f"packed-{k}" for k in range(6)], "no verdict: suspect runs"),
        ([f"padded-{k}" for k in range(6)], "no verdict: suspect runs"),
        (["packed-0", "packed-1", "padded-2"], "no verdict: suspect runs"),  # half of the pairs
    ],
)
def test_what_makes_runs_suspect_reaches_the_verdict(suspect, verdict):
    reasons = dict.fromkeys(suspect, ("suspect", "overlaps run x by 3 s; later reason"))
    found = answer(*campaign(ratio=2.2, validity=reasons))
    assert found["verdict"] == verdict and "overlaps run x by 3 s" in found["spread"]
    assert "later reason" not in found["spread"] and "2.2" in found["text"]


@pytest.mark.parametrize(
    ("validity", "said"),
    [
        ({"packed-6": ("invalid", "no seal; and more")}, "packed-6 (invalid: no seal)"),
        ({"padded-6": ("missing", "not started")}, "padded-6 (missing: not started)"),
        ({f"packed-{k}": ("invalid", f"reason {k}") for k in range(1, 7)}, "(invalid: reason 3)"),
        (
            {f"packed-{k}": ("invalid", "no seal") for k in range(1, 7)},
            "left out: 6 runs (invalid: no seal)",
        ),
    ],
)
def test_runs_that_are_left_out_stand_at_the_verdict_with_their_reasons(validity, said):
    found = answer(*campaign(ABBA + "AB", 1.2, validity=validity))
    assert said in found["spread"] and "and more" not in found["spread"]
    assert "left out" not in answer(*campaign(ABBA + "AB", 1.2))["spread"]


def test_a_run_that_is_not_comparable_is_left_out_with_what_differs():
    throughput, runs = campaign(ABBA + "AB", 1.2)
    runs.loc[runs["run_id"] == "packed-6", "sequence_length"] = 512
    found = answer(throughput, runs)
    assert "packed-6 (not comparable: " in found["spread"] and "512" in found["spread"]


@pytest.mark.parametrize("column", ["tokenizer_sha256", "validation_store_sha256"])
def test_losses_without_a_common_unit_get_no_verdict(column):
    throughput, runs = campaign()
    losses = runs[["run_id"]].assign(last=True, step=24, useful_tokens_seen=480, loss=5.0)
    losses.loc[runs["approach"] == "packed", "loss"] = 4.0
    assert answer(throughput, runs, losses, quantity="validation_loss")["verdict"] == "lower loss"
    runs[column] = runs["approach"]
    found = answer(throughput, runs, losses, quantity="validation_loss")
    assert "lower" not in found["verdict"] and "no common unit" in found["spread"]


@pytest.mark.parametrize(
    ("difference", "margin", "verdict"),
    [
        (-0.026, None, "lower loss"),
        (-0.026, 0.01, "lower loss"),
        (-0.026, 0.03, "equivalent"),
        (0.0, None, "no difference shown"),
        (0.0, 0.01, "equivalent"),
        (0.009, 0.01, "higher loss by less than the margin"),
    ],
)
def test_losses_are_equivalent_only_within_a_margin_that_the_design_states(
    difference, margin, verdict
):
    """0.026 nats are less than 1 % of the loss."""
    throughput, runs = campaign()
    noise = 0.002 * np.cos(np.arange(len(runs)))
    losses = runs[["run_id"]].assign(last=True, step=24, useful_tokens_seen=480, loss=3.3 + noise)
    losses.loc[runs["approach"] == "packed", "loss"] += difference
    found = answer(throughput, runs, losses, quantity="validation_loss", margin=margin)
    assert found["verdict"] == verdict
    assert f"{difference:+.1g}"[:4] in found["spread"] or not difference
    assert ("within ± " in found["spread"]) is (verdict == "equivalent")


@pytest.mark.parametrize(
    ("step", "tokens", "marked"), [(24, 480, False), (7, 480, True), (24, 140, False)]
)
def test_losses_after_unequal_updates_say_so(step, tokens, marked):
    throughput, runs = campaign()
    losses = runs[["run_id"]].assign(last=True, step=24, useful_tokens_seen=480, loss=5.0)
    losses.loc[runs["approach"] == "packed", ["step", "useful_tokens_seen", "loss"]] = (
        step,
        tokens,
        6.0,
    )
    found = answer(throughput, runs, losses, quantity="validation_loss")
    assert found["verdict"] == "higher loss" + ", unequal updates" * marked
    assert ("after 7 against 24 updates" in found["spread"]) is marked
    assert ("after 140 against 480 useful tokens" in found["spread"]) is (tokens == 140)
