"""Runs that go on from another's state, held against the run that was never interrupted: pairs,
claims, words.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import logs, tables
from tokenscale.analysis.queries import query
from tokenscale.analysis.runs import grouping, run_row, science
from tokenscale.referee import claims
from tokenscale.referee.claims import CONTRADICTED, SUPPORTED
from tokenscale.settings.claims import load_claims
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import state_path

LEDGER = Path(__file__).parents[2] / "config/replication.yaml"
KIND = "resumed and uninterrupted"


def made(folder, rows, steps):
    experiment = {"scale": "demo", "figures": ["ddp_verification_loss"]}
    return tables.write(folder / "elastic_resume", experiment, runs=rows, steps=steps)


def resumed(run_id: str, source: str, at: int, world_size=2, **fields):
    words = {"series": f"packed, resumed (from {source})", "factors": f"resumed (from {source})"}
    row = tables.run(
        run_id,
        **words,
        world_size=world_size,
        resumed_from=source,
        resumed_at=at,
        tokens_before=30 * at,
    )
    return row | {"steps_asked": 8 - at} | fields


def rest(run_id: str, at: int, world_size=2, **fields):
    """The steps of a run that begins at one: of two ranks, each has half of the tokens and of the
    loss.
    """
    halves = {
        "useful_tokens": 30 // world_size,
        "loss_sum": 60.0 / world_size,
        "order_digest": whole(world_size),
    }
    return [
        row for row in tables.steps(run_id, 8, world_size, **halves | fields) if row["step"] >= at
    ]


def whole(ranks: int, wrong: int | None = None):
    """Digests of `ranks` ranks whose sum is that of a step's samples; of step `wrong` another
    one.
    """
    return lambda step, rank: (
        (1000 + step - (ranks - 1) if rank == 0 else 1) + (step == wrong and rank == 0)
    )


def chain(folder, wrong=None, loss_sum=30.0):
    """One run to the end on 1 rank; from its step 2 on 2 ranks; from step 5 of that one on 1 rank
    again.
    """
    runs = [tables.run("a"), resumed("b", "a", 2), resumed("c", "b", 5, world_size=1)]
    steps = tables.steps("a", 8, order_digest=whole(1))
    steps += rest("b", 2, order_digest=whole(2, wrong), loss_sum=loss_sum) + rest("c", 5, 1)
    return made(folder, runs, steps)


def verdicts(folder):
    ledger = load_claims(LEDGER)
    ledger = replace(
        ledger, claims={k: v for k, v in ledger.claims.items() if k.startswith("resumed-")}
    )
    return {one.id: one.verdict for one in claims.judge_claims(ledger, folder, ["elastic_resume"])}


def test_a_resumed_run_is_held_against_the_one_that_was_never_interrupted_however_often_it_went_on(
    tmp_path,
):
    folder = chain(tmp_path)
    order = query("order", folder)[
        ["kind", "reference", "compared", "steps_compared", "steps_equal"]
    ]
    assert order.values.tolist() == [[KIND, "a", "b", 6, 6], [KIND, "a", "c", 3, 3]]
    found = query("loss_difference", folder)
    assert found.groupby("run_id")["step"].agg(["min", "max"]).loc[["b", "c"]].values.tolist() == [
        [2, 7],
        [5, 7],
    ]
    assert set(found["reference"]) == {"a"} and set(found["largest_difference"]) == {0.0}
    # tokens seen count those before the state
    for name in ("loss", "loss_curves"):
        seen = query(name, folder).groupby("run_id")["useful_tokens_seen"].agg(["min", "max"])
        assert seen.loc[["a", "b", "c"]].values.tolist() == [[30, 240], [90, 240], [180, 240]], name


def test_runs_at_several_world_sizes_are_paired_as_before(tmp_path):
    two = tables.run("a2", world_size=2)
    # one of them not told from the others by its cell
    runs = [
        tables.run("a"),
        two,
        resumed("b", "a", 2, series="packed"),
        resumed("d", "a", 2, world_size=4),
    ]
    folder = made(
        tmp_path, runs, tables.steps("a", 8) + rest("a2", 0) + rest("b", 2) + rest("d", 2, 4)
    )
    order = query("order", folder)
    assert order[order["kind"] == "world sizes"][["reference", "compared"]].values.tolist() == [
        ["a", "a2"]
    ]
    assert sorted(order[order["kind"] == KIND]["compared"]) == ["b", "d"]
    found = query("loss_difference", folder)
    assert set(found["reference"]) == {"a"}
    assert found.groupby("run_id")["steps"].sum().to_dict() == {"a2": 8, "b": 6, "d": 6}, (
        "each is held against one"
    )


@pytest.mark.parametrize(
    ("fields", "agree"),
    [
        ({"precision": "fp32", "compression": "none"}, False),
        ({"precision": "fp32", "compression": "bf16"}, True),
        ({"precision": "bf16", "compression": "none"}, True),
    ],
)
def test_gradients_rounded_to_bf16_have_the_tolerance_of_16_bits(fields, agree, tmp_path):
    runs = [tables.run("a", precision="fp32"), tables.run("b", world_size=2, **fields)]
    rows = tables.steps("a", 8) + rest("b", 0, loss_sum=30.03)
    (found,) = query("order", made(tmp_path, runs, rows))["losses_agree"]
    assert found == agree


@pytest.mark.parametrize(
    "source, change",
    [
        *(
            ({}, change)
            for change in ({"science": "other"}, {"repeat": 1}, {"resumed_from": "elsewhere"})
        ),
        ({"validity": "invalid"}, {}),
    ],
)
def test_runs_of_other_settings_or_repeats_or_from_elsewhere_are_no_pair(tmp_path, source, change):
    runs = [tables.run("a", **source), resumed("b", "a", 2, **change)]
    folder = made(tmp_path, runs, tables.steps("a", 8) + rest("b", 2))
    assert query("order", folder).empty and query("loss_difference", folder).empty


def test_claims_hold_where_samples_and_losses_are_equal_and_are_contradicted_by_one_step(tmp_path):
    names = ("resumed-same-losses", "resumed-same-samples")
    cases = {
        "good": ({}, SUPPORTED, SUPPORTED),
        "order": ({"wrong": 6}, SUPPORTED, CONTRADICTED),
        "loss": (
            {"loss_sum": lambda step, rank: 30.0 + 0.1 * (step == 4)},
            CONTRADICTED,
            SUPPORTED,
        ),
    }
    for case, (fields, *expected) in cases.items():
        chain(tmp_path / case, **fields)
        assert verdicts(tmp_path / case) == dict(zip(names, expected, strict=True)), case


def test_a_row_of_the_table_names_what_it_goes_on_from(tmp_path):
    source = logs.settings(steps=12)
    run = replace(logs.settings(world_size=2, steps=12), resume_from=state_path(source.identity, 4))
    assert science(run) == science(source), "it is to compute the same"
    cell = {"layout.data": 2, "resume_from": {"run": {"layout.data": 1}, "step": 4}}
    entry = {"run_id": run.identity, "cell": cell, "repeat": 0, "position": 1, "run": to_dict(run)}
    made = {"run": to_dict(run), "digest": "with-state", "code_and_inputs": "alone"}
    outcome = {"status": "complete", "steps": 12, "begins_at": 4, "begins_at_useful_tokens": 99}
    row = run_row(entry, "e", made | {"outcome": outcome})
    assert (row["resumed_from"], row["resumed_at"], row["tokens_before"]) == (
        source.identity,
        4,
        99,
    )
    assert row["steps_asked"] == 8 and row["code_digest"] == "alone", (
        "repeats share it, each with its own state"
    )
    assert (
        row["science_per_rank"]
        != run_row(entry | {"run": to_dict(source)}, "e", None)["science_per_rank"]
    )
    missing = run_row(entry, "e", None)
    assert (missing["resumed_from"], missing["resumed_at"]) == (source.identity, 4)
    begun = run_row(
        {"run_id": source.identity, "cell": {"resume_from": None}, "run": to_dict(source)},
        "e",
        None,
    )
    assert begun["resumed_from"] is None and begun["resumed_at"] is None


TWICE = {"run": {"layout.data": 2, "resume_from": {"step": 4}}, "step": 6}


@pytest.mark.parametrize(
    "level, series",
    [
        ({"run": {"layout.data": 1}, "step": 4}, "packed, resumed (data=1 to step 4)"),
        (None, "packed"),
        (TWICE, "packed, resumed (to step 4; data=2 to step 6)"),
    ],
)
def test_series_name_what_was_before_in_words(level, series):
    cell = {"approach": "packed", "layout": {"data": 2}, "resume_from": level}
    assert grouping("packed", cell)["series"] == series and grouping("packed", cell)["layout"] == ""
    assert (
        grouping("packed", cell | {"layout": {"shard": 2}})["series"] == f"{series}, layout.shard=2"
    )
