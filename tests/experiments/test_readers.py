"""Runs that only read: the batches of a training, timed alone, and what the report says of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import logs
from tests.corpora import Lab, make_run, take, texts_around
from tokenscale.analysis.queries import query
from tokenscale.arms import reader, studies
from tokenscale.arms.reader import read
from tokenscale.base import page_cache
from tokenscale.base.files import read_json, sha256_file, write_sealed
from tokenscale.cli.main import main
from tokenscale.costs.prices import READING_S, STARTING_S, estimate_run
from tokenscale.data.order.permutation import MODULUS
from tokenscale.data.stores.parquet import PaddedStore
from tokenscale.report.answers import answer_data
from tokenscale.report.campaign_quality import OFFLINE, proof
from tokenscale.report.drawings.tokenization_benchmark import TokenizationBenchmark
from tokenscale.settings.machine import Machine
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.run import (
    APPROACHES,
    READERS,
    STUDIED,
    BudgetSettings,
    CheckpointSettings,
    LayoutSettings,
    ReaderSettings,
    ValidationSettings,
)

pytestmark = pytest.mark.experiment

T = 16
STEPS = 9


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), texts_around(T) * 3, vocabulary_size=262)


def reading(approach="packed", arm="reader", **changes):
    settings = {
        "global_batch": 3,
        "micro_batch": 3,
        "budget": BudgetSettings(steps=STEPS),
        "validation": ValidationSettings(rows=0),
        "device": "cpu",
    }
    return make_run(approach, T, arm=arm, **settings | changes)


def measure(lab, folder, *runs):
    for run in runs:
        inputs = lab.inputs(run)
        directory = folder / "runs" / run.identity
        manifests = {"corpus": inputs.corpus, "tokenizer": inputs.tokenizer, "store": inputs.store}
        hashes = {
            role: sha256_file(where / "manifest.json")
            for role, where in manifests.items()
            if where is not None
        }
        (directory / "attempt=00").mkdir(parents=True)
        # as the launcher does
        write_sealed(directory / "attempt=00/attempt.json", {"inputs": hashes})
        read(run, inputs, directory)


def tabulate(lab, folder, *runs):
    """Tables of these runs, whose inputs are at hand."""
    stores = list((lab.directory / "tokens").glob("*/manifest.json"))
    corpora = [lab.corpus / "manifest.json"]
    further = ("arm", "engine", "reader.cold", "reader.workers")
    return logs.ingested(folder, runs, stores=stores, corpora=corpora, further=further)


def read_outcome(folder, run):
    return read_json(folder / "runs" / run.identity / "run.json")["outcome"]


@given(
    approach=st.sampled_from(APPROACHES),
    arm=st.sampled_from(["reader", "memcpy"]),
    rows=st.integers(1, 5),
    steps=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_steps_have_the_tokens_and_the_order_of_the_batches_and_add_up_to_the_time(
    lab, tmp_path_factory, approach, arm, rows, steps, seed
):
    folder = tmp_path_factory.mktemp("read")
    budget = BudgetSettings(steps=steps)
    run = reading(approach, arm, global_batch=rows, budget=budget, seed=seed)
    measure(lab, folder, run)
    logged = logs.read_steps(folder / "runs" / run.identity)
    for number, batch in enumerate(take(lab.batches(run), steps)):
        found = logged[number]
        assert (found["useful_tokens"], found["total_tokens"], found["rows"]) == (
            batch.useful_tokens,
            batch.total_tokens,
            rows,
        )
        assert found["order_digest"] % MODULUS == batch.order_digest
        assert 0 <= found["data_wait_s"] <= found["step_s"] and "loss_sum" not in found
    assert len(logged) == steps
    elapsed = logged[steps - 1]["t_mono_s"] - logged[0]["t_mono_s"]
    assert elapsed == pytest.approx(sum(logged[n]["step_s"] for n in range(1, steps)), abs=1e-6)


@pytest.mark.parametrize("room", [1, 90_000, 1 << 20])
@pytest.mark.parametrize("approach", ["packed", "length-bucketed"])
def test_copies_are_of_the_batches_also_where_few_fit_and_rows_have_several_lengths(
    lab, tmp_path, monkeypatch, approach, room
):
    monkeypatch.setattr(reader, "POOL_BYTES", room)
    run = make_run(
        approach,
        256,
        arm="memcpy",
        global_batch=3,
        budget=BudgetSettings(steps=30),
        validation=ValidationSettings(rows=0),
        device="cpu",
    )
    measure(lab, tmp_path, run)
    assert read_outcome(tmp_path, run)["status"] == "complete"
    widths = {batch.tokens_bt.shape for batch in take(lab.batches(run), 30)}
    assert (len(widths) > 1) == (approach == "length-bucketed")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_same_batches_with_any_number_of_workers(lab, tmp_path, workers):
    run = reading("pretokenized-padded", reader=ReaderSettings(workers=workers))
    measure(lab, tmp_path, run)
    assert read_outcome(tmp_path, run)["status"] == "complete"
    logged = logs.read_steps(tmp_path / "runs" / run.identity)
    useful = [batch.useful_tokens for batch in take(lab.batches(run), STEPS)]
    assert [logged[step]["useful_tokens"] for step in range(STEPS)] == useful


def test_every_reader_is_a_valid_run_with_its_own_name_in_the_figure(lab, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(page_cache, "drop_page_cache", lambda paths: 0.0 if list(paths) else 1.0)
    online = [reading(approach, engine="tokenizers") for approach in ("padded", "padding-free")]
    runs = [
        *map(reading, APPROACHES),
        *online,
        *(reading(approach, reader=ReaderSettings(cold=True)) for approach in APPROACHES),
        *(reading(approach, arm="studies") for approach in STUDIED),
        reading(arm="memcpy"),
        reading(reader=ReaderSettings(workers=0)),
    ]
    measure(lab, tmp_path, *runs)
    tables = tabulate(lab, tmp_path, *runs)
    judged = logs.read_runs(tables).to_pylist()
    assert {(row["validity"], row["reasons"]) for row in judged} == {("valid", "")}
    rows = query("benchmark", tables)
    expected = [*APPROACHES, *(f"{approach}, cold" for approach in APPROACHES)]
    expected += [f"{run.approach}, tokenizers" for run in online]
    expected += [f"studies' {approach}" for approach in STUDIED]
    assert sorted(rows["arm"]) == sorted([*expected, "memcpy", "packed, DataLoader 0"])
    assert (rows["cache"] == "cold").tolist() == [name.endswith(", cold") for name in rows["arm"]]
    assert rows["is_limit"].tolist() == [name == "memcpy" for name in rows["arm"]]
    assert (rows["batches"] == STEPS).all() and (rows["open_s"] > 0).all()
    by_arm = rows.set_index("arm")
    seconds = {run: sum(step["step_s"] for step in logs.read_steps(run).values())
               for run in (tmp_path / "runs").iterdir()}  # fmt: skip
    for arm, row in by_arm.iterrows():
        took = seconds[tmp_path / "runs" / row["run_id"]]
        assert row["ms_per_batch"] == pytest.approx(1e3 * took / STEPS), arm
        assert row["us_per_useful_token"] == pytest.approx(1e6 * took / row["useful_tokens"]), arm
    for twins in (("padded", "pretokenized-padded"), ("padding-free", "token-list")):
        assert len({by_arm.loc[name, "useful_tokens"] for name in twins}) == 1
    assert "Reading without training" in TokenizationBenchmark(rows).caption()


def test_what_only_reads_trains_on_nothing_and_has_no_losses_to_compare(lab, tmp_path):
    pytest.importorskip("transformers")
    runs = [reading(approach, arm) for approach in STUDIED for arm in ("reader", "studies")]
    measure(lab, tmp_path, *runs)
    tables = tabulate(lab, tmp_path, *runs)
    assert query("padding", tables).empty and query("dropped_text", tables).empty
    pairs = query("order", tables)
    assert len(pairs) == 2 and set(pairs["kind"]) == {OFFLINE}
    (part,) = [part for part in proof(pairs)["parts"] if part["kind"] == OFFLINE]
    assert part["text"] == (
        "Same data online against offline: proven. All 2 pairs have the same samples and useful "
        "tokens at every step."
    )
    assert [row[6:8] for row in part["table"].rows] == [["–", "–"]] * 2
    answer = answer_data(pairs, {"parts": [part]})[0]
    assert answer["text"].endswith(": equal samples and useful tokens at every step")


def test_what_cannot_be_read_here_fails_alone_and_says_why(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "drop_page_cache", lambda paths: 1.0)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    cold = reading(reader=ReaderSettings(cold=True))
    lacking = reading("padded", arm="studies")
    engine = reading("padded", engine="tiktoken")
    runs = [cold, lacking, engine, reading()]
    measure(lab, tmp_path, *runs)
    reasons = {
        cold: "100% of its files stay in the page cache",
        lacking: "package transformers is not installed.",
    }
    for run, reason in reasons.items():
        assert read_outcome(tmp_path, run)["reason"] == reason
    assert "tiktoken" in read_outcome(tmp_path, engine)["reason"]
    tables = tabulate(lab, tmp_path, *runs)
    rows = query("benchmark", tables).set_index("arm")
    left_out = rows["left_out"].dropna()
    assert set(left_out.index) == {"packed, cold", "studies' padded", "padded, tiktoken"}
    assert all(reason in left_out.to_string() for reason in reasons.values())
    assert reasons[cold] in TokenizationBenchmark(rows.reset_index()).caption()


def test_a_pass_that_reads_other_batches_than_the_one_before_fails(lab, tmp_path, monkeypatch):
    rows = PaddedStore.rows
    seen = []

    def changing(self, indices):
        tokens, labels = rows(self, indices)
        seen.append(len(indices))
        late = len(seen) > STEPS  # of the second pass
        return tokens + late * (np.arange(tokens.shape[1]) == 3), labels

    monkeypatch.setattr(PaddedStore, "rows", changing)
    run = reading("pretokenized-padded")
    measure(lab, tmp_path, run)
    outcome = read_outcome(tmp_path, run)
    assert outcome["status"] == "failed" and "read other batches" in outcome["reason"]


def test_a_reader_of_other_rows_than_the_plan_says_is_invalid(lab, tmp_path):
    """As of a training: the referee reads the store again."""
    run = reading("pretokenized-padded")
    other = replace(run, seed=1)
    read(other, lab.inputs(other), tmp_path / "runs" / run.identity)
    record = tmp_path / "runs" / run.identity / "run.json"
    assert read_json(record)["run_id"] == other.identity
    (row,) = logs.read_runs(logs.ingested(tmp_path, [run])).to_pylist()
    assert row["validity"] == "invalid"


def test_readers_are_judged_by_their_speed_and_traced_by_their_steps(lab, tmp_path, capsys):
    runs = [reading(name, seed=n) for name in ("padded", "pretokenized-padded") for n in range(2)]
    measure(lab, tmp_path, *runs)
    sets = [str(tmp_path / "runs" / run.identity) for run in runs]
    judged = ["judge", *sets[:2], "--over", *sets[2:]]
    assert main(judged) == 2
    assert "--quantity throughput, which both have" in capsys.readouterr().err
    assert main([*judged, "--quantity", "throughput"]) == 0
    printed = capsys.readouterr().out
    assert " reads " in printed and "trains" not in printed
    assert main(["trace", sets[0], "--loss-spike"]) == 2
    assert "a run that only reads has no loss" in capsys.readouterr().err
    theirs = reading("padded", arm="studies")
    pytest.importorskip("transformers")
    measure(lab, tmp_path, theirs)
    assert main(["trace", str(tmp_path / "runs" / theirs.identity), "--step", "0"]) == 2
    assert "an order of their own" in capsys.readouterr().err


def test_the_studies_readers_have_their_double_bos_and_their_mask(lab):
    pytest.importorskip("transformers")
    batches = {}
    for approach in STUDIED:
        run = reading(approach, arm="studies", global_batch=2)
        batches[approach] = studies.open_reader(run, lab.inputs(run)).next()
    online = batches["padding-free"]
    assert online.tokens_bt.shape == online.labels_bt.shape == (2, T)
    first = online.tokens_bt[0].tolist()
    # BOS by the loop, and by the tokenizer
    assert first[:2] == [0, 0] == batches["token-list"].tokens_bt[0].tolist()[:2]
    assert (online.labels_bt[0][np.array(first) == 0] == -100).all()
    padded = [batches[a].tokens_bt.tolist() for a in ("padded", "pretokenized-padded")]
    assert padded[0] == padded[1]


def test_the_studies_readers_take_their_files_and_the_tokenizer():
    """It has the ids of BOS and padding, which their masks are made of."""
    stores = {"pretokenized-padded": "padded-sequence_length=16-", "token-list": "token-list-"}
    for approach in STUDIED:
        found = list_manifests(reading(approach, arm="studies"))
        assert "tokenizer" in found and "arm" not in found
        read = f"/{stores.get(approach)}codec=snappy-dtype=int64/"
        assert (read in found.get("store", "")) == (approach in stores)


def test_a_reader_has_a_price_on_a_cluster_and_computes_nothing():
    tokens = STEPS * 3 * T
    there = estimate_run(reading(), Machine(starter="srun"))
    assert there.seconds == STARTING_S + READING_S * tokens and "at most" in there.bound
    here = estimate_run(reading(), Machine())
    assert here.seconds is None and "not predicted" in here.unknown
    assert here.flops is there.flops is None and here.steps == STEPS


WRONG = {
    "budget": {"budget": BudgetSettings(epochs=1)},
    "layout": {"layout": LayoutSettings(data=2)},
    "validation.rows": {"validation": ValidationSettings(rows=4)},
    "checkpoints": {"checkpoints": CheckpointSettings(final=True)},
    "resume_from": {"resume_from": "results/runs/x/step=1"},
    "prefetch": {"prefetch": True},
    "device": {"device": "auto"},
}


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("arm", READERS)
def test_settings_without_use_for_a_reader_are_named(arm, key):
    found = dict(reading("padded", arm=arm, **WRONG[key]).problems())
    assert key in found and f"arm {arm} only reads" in found[key]


def test_how_to_read_is_asked_only_of_arms_that_can():
    cold = ReaderSettings(cold=True)
    loader = ReaderSettings(workers=2)
    for arm, how, key in (
        ("tokenscale", cold, "reader"),
        ("litgpt", loader, "reader"),
        ("memcpy", cold, "reader.cold"),
        ("memcpy", loader, "reader.workers"),
        ("studies", loader, "reader.workers"),
    ):
        found = dict(reading("padded", arm=arm, reader=how).problems())
        assert key in found, arm
    assert "approach" in dict(reading("packed", arm="studies").problems())
    for arm in READERS:
        assert not list(reading("padded", arm=arm, budget=BudgetSettings(steps=1)).problems()), arm
