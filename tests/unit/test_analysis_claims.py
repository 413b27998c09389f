"""The ledger of claims: what is read, what is judged, and what holds."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import tables
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.referee import claims
from tokenscale.referee.claims import CONTRADICTED, INCONCLUSIVE, NOT_TESTED, SUPPORTED
from tokenscale.referee.statistics import sign_flip_p
from tokenscale.report import claims as words
from tokenscale.report.claims import verdict_words
from tokenscale.settings.claims import Claim, ClaimsFile, Document, load_claims

pytestmark = pytest.mark.slow(20)

ROOT = Path(__file__).parents[2]
SPEED = "SELECT useful_tokens_per_s AS value, run_id FROM throughput WHERE approach = 'packed'"
PAIRS = """
    SELECT t.useful_tokens_per_s AS value, p.useful_tokens_per_s AS baseline, t.run_id, p.run_id AS other_run_id
    FROM throughput AS t JOIN throughput AS p ON p.repeat = t.repeat AND p.approach = 'padded'
    WHERE t.approach = 'packed'
"""


def claim(**fields):
    values = {
        "document": "paper",
        "claim": "it is fast",
        "experiments": ("demo",),
        "sql": PAIRS,
        "direction": "above",
    }
    return Claim(**values | {"sentence": "{number} times ({spread}, {n})"} | fields)


def ledger(**of):
    return ClaimsFile(
        {"paper": Document("A paper")}, {name.replace("_", "-"): c for name, c in of.items()}
    )


def lab(folder, packed, padded=(1.0,) * 12, changes=None, name="demo"):
    """Tables of runs of two approaches, by seconds a step; 30 useful tokens in each."""
    runs = []
    steps = []
    for approach, seconds in (("packed", packed), ("padded", padded[: len(packed)])):
        for repeat, step_s in enumerate(seconds):
            run_id = f"{approach}-{repeat}"
            fields = {"repeat": repeat, "seed": repeat, "cell": f"approach={approach}"}
            runs.append(
                tables.run(run_id, approach=approach, **fields | (changes or {}).get(run_id, {}))
            )
            steps += tables.steps(run_id, 8, step_s=step_s)
    tables.write(folder / name, {"scale": "demo"}, runs=runs, steps=steps)
    return folder


def judged(folder, one, experiments=("demo",)):
    (found,) = claims.judge_claims(ledger(one=one), folder, experiments)
    return found


@pytest.mark.parametrize(
    ("seconds", "fields", "verdict"),
    [
        ([0.5] * 6, {}, SUPPORTED),
        ([2.0] * 6, {}, CONTRADICTED),
        ([2.0] * 6, {"direction": "below"}, SUPPORTED),
        ([0.5] * 6, {"direction": "below"}, CONTRADICTED),
        ([0.5, 2.0] * 3, {}, INCONCLUSIVE),
        ([0.5] * 5, {}, INCONCLUSIVE),  # the range of five covers a median in 93.75 % of cases
        ([0.5], {"exact": True}, SUPPORTED),
        ([2.0], {"exact": True}, CONTRADICTED),
        ([0.5, 2.0], {"exact": True}, INCONCLUSIVE),
        ([0.5] * 6, {"bound": 1.9}, SUPPORTED),
        ([0.5] * 6, {"bound": 2.1}, CONTRADICTED),
        # there is an effect, and it is none that counts
        ([0.995] * 6, {"margin": 0.01}, CONTRADICTED),
        ([0.97] * 6, {"margin": 0.01}, SUPPORTED),
        # in part beyond the margin, in part not
        ([0.995, 0.9] * 3, {"margin": 0.01}, INCONCLUSIVE),
        ([1.0], {"exact": True}, CONTRADICTED),  # equal is not above
        ([1.0], {"exact": True, "direction": "below"}, CONTRADICTED),
        # at the margin, and from there on
        ([0.5], {"exact": True, "direction": "equal", "margin": 1.0}, SUPPORTED),
        ([2.0], {"exact": True, "direction": "equal", "margin": 0.5}, SUPPORTED),
        ([0.5, 0.25], {"exact": True, "direction": "equal", "margin": 1.0}, INCONCLUSIVE),
        ([2.0, 4.0], {"exact": True, "direction": "equal", "margin": 0.5}, INCONCLUSIVE),
        ([0.5] * 6, {"bound": 0.0}, SUPPORTED),
        ([0.5] * 8 + [5.0], {"bound": 1.9}, INCONCLUSIVE),  # one far below
        ([1.0] * 6, {"direction": "equal", "margin": 0.01}, SUPPORTED),
        ([0.9] * 6, {"direction": "equal", "margin": 0.01}, CONTRADICTED),
        ([0.9, 1.0] * 3, {"direction": "equal", "margin": 0.01}, INCONCLUSIVE),
        ([1.0] * 3, {"direction": "equal", "margin": 0.01}, INCONCLUSIVE),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_verdict_takes_the_whole_interval_and_enough_points(tmp_path, seconds, fields, verdict):
    found = judged(lab(tmp_path, seconds), claim(**fields))
    assert found.verdict == verdict, found
    assert found.experiment == "demo" and found.scale == "demo" and found.cells[0].n == len(seconds)
    assert len(found.run_ids) == 2 * len(seconds)


@pytest.mark.parametrize(
    ("seconds", "fields", "reason"),
    [
        ([0.5, 2.0] * 3, {}, "the bound lies inside the interval"),
        ([0.995, 0.9] * 3, {"margin": 0.01}, "the margin lies inside the interval"),
        ([0.995] * 6, {"margin": 0.01}, "no further from 1.00 than 1.00 %"),
        ([1.005] * 6, {"margin": 0.01, "direction": "below"}, "no further from 1.00 than 1.00 %"),
        ([1.1] * 6, {"margin": 0.01}, ""),
        ([1.1] * 6, {}, ""),
        ([0.9] * 6, {"direction": "equal", "margin": 0.01}, ""),
        ([1.0] * 6, {"direction": "equal", "margin": 0.01}, ""),
    ],
)
def test_a_verdict_has_a_reason_where_its_word_leaves_one_open(tmp_path, seconds, fields, reason):
    assert judged(lab(tmp_path, seconds), claim(**fields)).reason == reason


def test_suspect_runs_are_counted_and_a_run_in_two_points_of_a_cell_carries_no_verdict(tmp_path):
    changes = {run_id: {"validity": "suspect"} for run_id in ("padded-0", "packed-5")}
    found = judged(lab(tmp_path / "a", [0.5] * 6, changes=changes), claim())
    assert (found.verdict, found.reason) == (SUPPORTED, "suspect runs: 2 of 12")
    lab(tmp_path / "b", [0.5] * 6)
    twice = PAIRS.replace("p.repeat = t.repeat AND", "abs(p.repeat - t.repeat) < 2 AND")
    found = judged(tmp_path / "b", claim(sql=twice))
    assert (
        found.verdict == INCONCLUSIVE
        and found.reason == "its points share runs, so that they are not independent"
    )
    exact = judged(tmp_path / "b", claim(sql=twice, exact=True))
    assert (exact.verdict, exact.reason) == (SUPPORTED, ""), "counts are what they are"


def in_cells(cells):
    names = " ".join(f"WHEN t.repeat < {6 * (i + 1)} THEN '{name}'" for i, name in enumerate(cells))
    return PAIRS.replace("t.run_id,", f"t.run_id, CASE {names} END AS cell,")


def test_each_claim_is_tested_at_its_own_level_and_equality_at_its_margin(tmp_path):
    lab(tmp_path / "half", [0.5] * 6)  # p = 1/32
    found = claims.judge_claims(
        ledger(a=claim(), b=claim(), c=claim()), tmp_path / "half", ["demo"]
    )
    assert [(one.verdict, one.cells[0].p) for one in found] == [(SUPPORTED, 1 / 32)] * 3
    equal = judged(lab(tmp_path / "equal", [1.0] * 6), claim(direction="equal", margin=0.01))
    assert equal.cells[0].p == pytest.approx(1 / 32)


@pytest.mark.parametrize(
    ("values", "fields", "edge"),
    [
        # logarithms of values that are all above zero, also below one
        ([0.8, 0.7, 0.4, 0.3, 0.5, 0.4], {"bound": 0.45}, 0.45),
        # differences of others
        ([3, 0, 1, 2, 3, 1], {"bound": 1.0}, 1.0),
        ([3, -0.5, 1, 2, 3, 1], {"bound": 1.0}, 1.0),
        ([3, 1, 1, 2, 3, 1], {"bound": -1.0}, -1.0),
        # the edge that a margin puts before or behind the bound
        ([1.2, 1.3, 1.005, 1.2, 1.1, 1.3], {"margin": 0.01}, 1.01),
        ([0.8, 0.7, 0.995, 0.8, 0.9, 0.7], {"margin": 0.01, "direction": "below"}, 0.99),
        # "equal" within the margin has the larger p of both edges
        ([1.008] * 3 + [1.0, 1.012, 1.005], {"direction": "equal", "margin": 0.01}, 1.01),
        ([0.992] * 3 + [1.0, 0.988, 0.995], {"direction": "equal", "margin": 0.01}, 0.99),
        # and is contradicted by the edge that the median is beyond, whatever the mean
        (
            [0.912, 0.975, 0.968, 0.923, 1.2, 1.18],
            {"direction": "equal", "margin": 0.01},
            0.99,
        ),
        ([0.9] * 5 + [0.995], {"direction": "equal", "margin": 0.01}, 0.99),
        ([1.1] * 5 + [1.005], {"direction": "equal", "margin": 0.01}, 1.01),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_points_are_tested_by_ratios_or_differences_to_the_edge(tmp_path, values, fields, edge):
    x = np.array(values)
    lab(tmp_path, [30 / (value + 10) for value in values])
    found = judged(tmp_path, claim(sql=SPEED.replace("AS value", "- 10 AS value"), **fields))
    distances = np.log(x / edge) if (x > 0).all() and edge > 0 else x - edge
    assert found.cells[0].p == pytest.approx(sign_flip_p(distances)[0])


@pytest.mark.parametrize("values", [[1, 2, 2.5, 3, 6, 9, 10], [2.9, 2.95, 2.98, 3, 6, 7, 8]])
def test_a_median_at_an_edge_of_the_margin_is_tested_at_both_edges(values):
    """The larger p is that of this edge for the first points, of the other edge for the second."""
    equal = claim(direction="equal", bound=4.0, margin=0.25)
    for x, edge in ((np.array(values), 3), (15 / np.array(values), 5)):
        near, far = (sign_flip_p(np.log(x / tested)) for tested in (3, 5))
        assert np.median(x) == edge and near != far
        assert claims._test_points(equal, x) == max(near, far)


@pytest.mark.parametrize(
    ("times", "which", "verdict", "p"),
    [
        ([0.5, 0.25], "all", SUPPORTED, 1 / 32),  # all must hold: each is tested alone
        # one is enough to contradict: corrected for the other
        ([0.5, 2.0], "all", INCONCLUSIVE, 2 / 32),
        ([0.5, 0.25], "largest", INCONCLUSIVE, 2 / 32),  # chosen after the fact
    ],
)
def test_cells_are_corrected_where_one_of_several_decides(tmp_path, times, which, verdict, p):
    lab(tmp_path, [seconds for seconds in times for _ in range(6)])
    found = judged(tmp_path, claim(sql=in_cells("ab"), cells=which))
    assert found.verdict == verdict, found
    assert found.cells[-1].name == "b" and found.cells[-1].corrected_p == pytest.approx(2 / 32)


@pytest.mark.parametrize(
    ("seconds", "published", "reproduced", "words"),
    [
        ([0.5] * 6, (), None, ["supported"]),
        ([0.5] * 6, (2.0,), True, ["supported"]),
        ([0.5] * 6, (2.09,), True, ["supported"]),
        ([0.5] * 6, (2.3,), False, ["direction supported", "figure not reproduced"]),
        ([0.5] * 6, (1.2, 1.8), False, ["direction supported", "figure not reproduced"]),
        ([0.5] * 6, (1.5, 1.95), True, ["supported"]),
        # near it in part
        ([0.5] * 5 + [0.4], (2.0,), None, ["direction supported", "figure not decided"]),
    ],
)
def test_a_supported_direction_says_whether_the_figure_is_reproduced(
    tmp_path, seconds, published, reproduced, words
):
    book = ledger(one=claim(published=published))
    (row,) = claims.list_verdicts(book, claims.judge_claims(book, lab(tmp_path, seconds), ["demo"]))
    assert row["reproduced"] is reproduced and verdict_words(row) == words


def test_runs_of_other_programs_are_no_points_and_rows_without_a_cell_are_one(tmp_path):
    theirs = {f"packed-{i}": {"external": True} for i in range(6)}
    assert judged(lab(tmp_path / "a", [0.5] * 6, changes=theirs), claim()).verdict == NOT_TESTED
    sql = PAIRS.replace("t.run_id,", "t.run_id, CASE WHEN t.repeat > 5 THEN 'a' END AS cell,")
    found = judged(lab(tmp_path / "b", [2.0] * 6), claim(sql=sql))
    assert found.verdict == CONTRADICTED and [cell.name for cell in found.cells] == [""]
    written_otherwise = PAIRS.replace("FROM throughput", "from\n Throughput") + " order by t.run_id"
    assert judged(tmp_path / "b", claim(sql=written_otherwise)).verdict == CONTRADICTED


@pytest.mark.parametrize(
    ("fields", "verdict", "sentence"),
    [
        ({"bound": 1.9}, SUPPORTED, "2.00 to 4.00: a, b"),
        ({"bound": 3}, CONTRADICTED, "2.00 to 4.00: a, b"),
        ({"bound": 3, "cells": "largest"}, SUPPORTED, "4.00: b"),
        ({"bound": 3, "cells": "largest", "direction": "below"}, SUPPORTED, "2.00: a"),
    ],
)
def test_a_claim_about_several_cells_holds_where_all_of_them_do(
    tmp_path, fields, verdict, sentence
):
    lab(tmp_path, [0.5] * 6 + [0.25] * 6)
    found = judged(
        tmp_path, claim(sql=in_cells("ab"), exact=True, sentence="{number}: {cells}", **fields)
    )
    assert (found.verdict, found.sentence) == (verdict, sentence)


def test_runs_that_are_not_alike_are_left_out_and_named(tmp_path):
    longer = {f"packed-{i}": {"sequence_length": 20} for i in range(6)}
    found = judged(lab(tmp_path, [0.5] * 6, changes=longer), claim(compares="approach"))
    assert (
        found.verdict == NOT_TESTED and "sequence_length 20" in found.refused and not found.run_ids
    )
    assert judged(tmp_path, claim()).verdict == SUPPORTED, "the claim did not say what may differ"


def test_what_was_never_reached_is_longer_than_everything(tmp_path):
    value = "CASE WHEN repeat = 0 THEN 'inf'::DOUBLE ELSE 2.0 END AS value"
    sql = f"SELECT {value}, run_id FROM runs WHERE approach = 'packed'"
    found = judged(lab(tmp_path, [0.5] * 6), claim(sql=sql))
    assert (
        found.verdict == SUPPORTED
        and found.cells[0].high == float("inf")
        and "2.00 to never" in found.sentence
    )
    assert judged(tmp_path, claim(sql=sql, direction="below", bound=3)).verdict == INCONCLUSIVE
    (row,) = claims.list_verdicts(ledger(one=claim(sql=sql)), [found])
    json.dumps(row, allow_nan=False)


def test_the_first_experiment_with_rows_answers(tmp_path):
    lab(tmp_path, [], name="empty")
    lab(tmp_path, [0.5] * 6, name="later")
    one = claim(experiments=("absent", "empty", "later"))
    assert judged(tmp_path, one, ("empty", "later")).experiment == "later"
    nothing = judged(tmp_path, claim(experiments=("empty",), needs="a GPU"), ("empty",))
    assert (
        nothing.verdict == NOT_TESTED and nothing.sentence == "Needs a GPU." and nothing.cells == ()
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sql": "SELECT x FROM runs"}, "does not run"),
        ({"sentence": "{device}"}, "lacks a column"),
        ({"sql": "SELECT 1 AS value", "compares": "approach"}, "lacks a column"),
        ({"sql": "SELECT 'much' AS value"}, "gives no number"),
    ],
)
def test_sql_that_does_not_fit_is_named(tmp_path, fields, said):
    with pytest.raises(UserError, match=said) as caught:
        judged(lab(tmp_path, [0.5] * 6), claim(**fields))
    assert caught.value.facts["claim"] == "one"


FILE = """
documents: {paper: {title: A paper}}
claims:
  fast:
    document: paper
    claim: it is fast
    experiments: [demo]
    sql: SELECT 1.0 AS value
    sentence: "{number} times"
    direction: above
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("direction: above", "direction: above\n    bound: .nan", "not a finite number"),
        (
            "direction: above",
            "direction: equal\n    margin: 0.1\n    bound: 0",
            "needs a bound other than zero",
        ),
        ("direction: above", "direction: equal", "needs a margin above zero"),
        ("document: paper", "document: papers", "did you mean 'paper'"),
        ("  fast:", "  Fast one:", "cannot have this name"),
        ("{number} times", "{number:.3f} times", "is not a placeholder"),
        ("{number} times", "{number.__class__} times", "is not a placeholder"),
        ("{number} times", "{number times", "A brace is written {{"),
        ("direction: above", "direction: above\n    holds_at: [dem]", "did you mean 'demo'"),
    ],
)
def test_a_ledger_with_a_mistake_is_refused(tmp_path, old, new, said):
    path = tmp_path / "claims.yaml"
    path.write_text(FILE)
    assert load_claims(path).claims["fast"].direction == "above"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(UserError, match=re.escape(said)):
        load_claims(path)


def test_strict_fails_where_edited_data_no_longer_carry_a_sentence(tmp_path, capsys):
    path = tmp_path / "claims.yaml"
    path.write_text(
        FILE.replace("SELECT 1.0 AS value", json.dumps(SPEED))
        + "    bound: 50\n    holds_at: [demo]\n"
    )
    call = [
        "claims",
        "--ledger",
        str(path),
        "--tables",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
    ]

    def judged_as():
        (row,) = json.loads((tmp_path / "out/claims.json").read_text())["claims"]
        return row["verdict"], row["number"], row["n"]

    lab(tmp_path, [0.5] * 6)
    assert main([*call, "--strict"]) == 0 and judged_as() == (SUPPORTED, 60.0, 6)
    lab(tmp_path, [1.0] * 6)
    assert main(call) == 0, "only strict mode fails"
    capsys.readouterr()
    assert main([*call, "--strict"]) == 1 and judged_as() == (CONTRADICTED, 30.0, 6)
    assert "a sentence no longer holds: fast" in capsys.readouterr().err
    lab(tmp_path, [])
    assert main([*call, "--strict"]) == 1, "what cannot be tested is not shown to hold"


def test_macros_are_latex(tmp_path):
    known = ledger(ddp_94=claim(unit="percent", bound=0.5, sentence="{number} of a_b & c"))
    (row,) = claims.list_verdicts(
        known, claims.judge_claims(known, lab(tmp_path, [0.5] * 6), ["demo"])
    )
    assert r"\newcommand{\claimDdpNineFour}{200 \% of a\_b \& c}" in words.macros([row])


@pytest.mark.parametrize(
    "names", [("fast-1", "fast-one"), ("fast", "fast-low"), ("fast-n", "fast")]
)
def test_two_claims_with_one_macro_are_refused_before_anything_is_written(tmp_path, names):
    lab(tmp_path, [0.5] * 6)
    known = ledger(**dict.fromkeys(names, claim()))
    with pytest.raises(UserError, match="two claims have one LaTeX macro") as caught:
        words.write_claims(
            claims.list_verdicts(known, claims.judge_claims(known, tmp_path, ["demo"])),
            tmp_path / "out",
        )
    assert all(name in caught.value.render() for name in names) and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shipped():
    """Both of the project's ledgers as one, all of whose claims ask `demo`."""
    own, studies = (load_claims(ROOT / f"config/{name}.yaml") for name in ("claims", "replication"))
    assert not own.claims.keys() & studies.claims.keys()
    claims = own.claims | studies.claims
    experiments = {path.stem for path in (ROOT / "config/experiments").glob("*.yaml")}
    assert {name for claim in claims.values() for name in claim.experiments} <= experiments
    return ClaimsFile(
        own.documents | studies.documents,
        {name: replace(claim, experiments=("demo",)) for name, claim in claims.items()},
    )


def test_the_sql_of_every_claim_runs_on_tables_with_and_without_rows(shipped, tmp_path):
    empty, some = (
        claims.judge_claims(shipped, lab(tmp_path / f"{n}", [0.5] * n), ["demo"]) for n in (0, 6)
    )
    assert {judgement.verdict for judgement in empty} == {NOT_TESTED} and len(some) == len(
        shipped.claims
    )


def grid(folder):
    """Every combination of approach, ranks, micro-batch, codec and number format on GPUs, six
    times, weak scaling; and the same once more by another program.
    """
    runs = []
    steps = []
    events = []
    levels = itertools.product(
        range(6), (1, 4), (2, 4), ("fp32", "bf16"), APPROACHES, (False, True)
    )
    for repeat, world, micro, precision, (approach, codecs), external in levels:
        for codec in codecs:
            factors = f"micro_batch={micro}, precision={precision}"
            cell = f"approach={approach}, {factors}, layout.data={world}" + (
                f", {codec}" if codec else ""
            )
            run_id = f"{cell}-{repeat}-{external}"
            runs.append(
                tables.run(
                    run_id,
                    repeat=repeat,
                    seed=repeat,
                    cell=cell,
                    approach=approach,
                    factors=factors,
                    storage=codec,
                    series=", ".join(filter(None, [approach, factors, codec])),
                    world_size=world,
                    micro_batch=micro,
                    precision=precision,
                    external=external,
                    global_batch=8 * world,
                    data=world,
                    shard=1,
                    tensor=1,
                    pipeline=1,
                    method="ddp" if world > 1 else "single",
                    device="H",
                    device_kind="cuda",
                    flops_per_token=1e6,
                    peak_flops=1e12,
                    science=f"{precision}{repeat}{world}{external}",
                    science_per_rank=f"{precision}{external}",
                )
            )
            steps += tables.steps(run_id, 5, world, data_wait_s=0.1, step_s=1.0)
            events.append(tables.validation(run_id, 5, 3.0))
    return tables.write(folder, {"scale": "demo"}, runs=runs, steps=steps, events=events)


APPROACHES = [("padded", [""]), ("padding-free", [""])] + [
    (stored, ["storage.codec=snappy", "storage.codec=zstd"])
    for stored in ("pretokenized-padded", "token-list")
]
#: in how many cells such a grid must test claims
OF_GRID = {
    # 2 micro-batches, 2 formats, 2 codecs
    8: "stored-padded-slower stored-padded-below-both slower-by-reading training-hardly-changes "
    "computing-is-the-bottleneck stored-keeps-mfu compounding",
    4: "benefit-grows-with-batch padding-free-faster",  # 2 formats, 2 codecs
    24: "ddp-efficiency near-linear larger-worlds-converge-by-step "
    "larger-worlds-reach-the-target-sooner "
    "mixed-precision-faster mixed-precision-quality",
    1: "ddp-efficiency-best",
    0: "ddp-94",  # no run of one rank has as many rows in all
}


def test_claims_hold_other_factors_fixed_and_count_each_run_once(shipped, tmp_path):
    grid(tmp_path / "demo")
    crossed = {one.id: one.cells for one in claims.judge_claims(shipped, tmp_path, ["demo"])}
    for count, name in (
        (count, name) for count, names in OF_GRID.items() for name in names.split()
    ):
        assert len(crossed[name]) == count, name
        assert {(cell.n, cell.repeated) for cell in crossed[name]} <= {(6, False)}, name
        assert {cell.number for cell in crossed[name]} <= {0.0, 0.1, 1.0}, (
            "all of these runs are alike"
        )
