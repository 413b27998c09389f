"""The benchmarks of data and of storage: checked before timed, counted like for like, complete in
their records.
"""

import json
import multiprocessing
import sys
import time
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.corpora import Lab, make_run, texts_around
from tokenscale.base.errors import UserError
from tokenscale.benchmark import data
from tokenscale.benchmark.workers import AnyReader
from tokenscale.benchmark.workers import measure as measure_loader
from tokenscale.cli.main import main
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.torch_data import BatchStream
from tokenscale.data.stores.parquet import PaddedStore
from tokenscale.settings.benchmarks import DataBenchmarkSettings
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.run import APPROACHES

pytestmark = pytest.mark.experiment

T = 16


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"), texts_around(T) * 3, vocabulary_size=262)
    for form, options in (("padded", {"sequence_length": T}), ("token-list", {})):
        lab.store(StoreSettings(form, **options))
        lab.store(StoreSettings(form, codec="snappy", dtype="int64", **options))
    lab.store(StoreSettings("packed", sequence_length=T))
    lab.store(StoreSettings("lengths"))
    return lab


def arguments(lab, output):
    settings = {"sequence_length": T, "rows": 3, "batches": 4, "rounds": 2, "studies": True}
    return [
        "benchmark",
        "data",
        "--settings",
        json.dumps(settings),
        "--corpus",
        str(lab.corpus / "manifest.json"),
        "--tokenizer",
        str(lab.tokenizer / "manifest.json"),
        "--stores",
        str(lab.directory / "tokens"),
        "--output",
        str(output),
    ]


WARM = [
    *APPROACHES,
    "padded, tokenizers",
    "padding-free, tokenizers",
    *data.PACKED,
    *data.studies.ARMS,
    "memcpy",
]
COLD = [f"{arm}, cold" for arm in (*APPROACHES, *data.studies.ARMS)]


@pytest.fixture(scope="module")
def measured(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    with redirect_stdout(StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tokenscale.benchmark.machine.drop_page_cache",
            lambda paths: 0.0 if list(paths) else 1.0,
        )
        assert main(arguments(lab, folder / "out.json")) == 0
    return json.loads((folder / "out.json").read_text()), printed.getvalue()


def test_every_arm_runs_in_every_round_and_says_what_tokenized_and_whether_files_were_in_memory(
    measured,
):
    pytest.importorskip("transformers")
    result, printed = measured
    found = sorted((r["round"], r["arm"]) for r in result["records"])
    assert found == sorted((n, arm) for n in range(2) for arm in [*WARM, *COLD])
    assert result["left_out"] == result["peers"] == {}
    for record in result["records"]:
        count = 4 * 64 if record["arm"] in data.FAST else 4
        assert (
            record["batches"] == len(record["batch_s"]) == count
            and record["total_tokens"] == count * 3 * T
        )
        assert record["memory_bytes"] >= 0
        assert (record["open_s"] > 1e-4) == (record["arm"] != "memcpy")  # which opens nothing
        assert 0 < record["useful_tokens"] <= record["total_tokens"]
        assert record["seconds"] == pytest.approx(sum(record["batch_s"]))
        cold = record["arm"] in COLD
        assert (record["cache"] == "cold") == ("kept_share" in record) == cold
    assert all(f"\n{arm} " in printed for arm in WARM + COLD)
    assert "  studies' token-list / packed " in printed
    records = {record["arm"]: record for record in result["records"]}
    useful = {arm: record["useful_tokens"] for arm, record in records.items()}
    assert (
        useful["padded"] == useful["pretokenized-padded"]
        and useful["padding-free"] == useful["token-list"]
    )
    engines = {arm: record["engine"] for arm, record in records.items() if record["engine"]}
    assert engines == {
        f"{arm}{more}": "tokenizers" if "tokenizers" in more else result["engine"]
        for arm in ("padded", "padding-free")
        for more in ("", ", cold", ", tokenizers")
    }


def test_arms_that_cannot_be_cold_or_lack_a_package_or_store_are_left_out_or_refused(
    lab, tmp_path, monkeypatch
):
    monkeypatch.setattr("tokenscale.benchmark.machine.drop_page_cache", lambda paths: 1.0)
    monkeypatch.setitem(sys.modules, "transformers", None)
    settings = DataBenchmarkSettings(
        sequence_length=T,
        rows=2,
        batches=1,
        rounds=1,
        engines=(),
        workers=(0, 2),
        studies=True,
    )
    result = data.measure(
        settings, lab.corpus, lab.tokenizer, lab.directory / "tokens", tmp_path / "out.json"
    )
    assert {record["cache"] for record in result["records"]} == {"warm"}
    found = {r["arm"]: r for r in result["records"] if "DataLoader" in r["arm"]}
    assert set(found) == {f"{arm}, DataLoader {n}" for arm in APPROACHES for n in (0, 2)}
    assert (
        found["packed, DataLoader 2"]["workers"] == 2
        and len(found["packed, DataLoader 2"]["batch_s"]) == 1
    )
    assert result["left_out"]["packed, cold"] == "100% of its files stay in the page cache"
    assert not {record["arm"] for record in result["records"]} & set(data.studies.ARMS)
    assert result["left_out"]["studies' token-list"] == "package transformers is not installed"
    with pytest.raises(UserError, match="snakemake -f"):
        data.measure(settings, lab.corpus, lab.tokenizer, tmp_path, tmp_path / "out.json")


def test_an_engine_that_is_not_here_not_exact_or_taken_anyway_has_no_arm(lab, monkeypatch):
    asked = ("gigatoken", "tiktoken", "tokenizers")
    pytest.importorskip("gigatoken")
    found, left_out = data.machine.list_engines(asked, lab.tokenizer, auto="gigatoken")
    assert found == ["tokenizers"] and left_out["gigatoken"] == "auto already uses this engine"
    assert "tiktoken" in left_out["tiktoken"]  # no engine of this kind of tokenizer
    monkeypatch.setattr(
        "tokenscale.data.tokenizers.backends.EngineTokenizer.difference", lambda *a: {"text": "'x'"}
    )
    found, left_out = data.machine.list_engines(asked, lab.tokenizer, auto="none")
    assert not found and left_out["gigatoken"] == "its ids are not those of the reference"


def test_the_studies_arms_have_their_double_bos_and_their_mask(lab):
    pytest.importorskip("transformers")
    options = {"codec": "snappy", "dtype": "int64"}
    stores = {"token-list": lab.store(StoreSettings("token-list", **options))}
    stores["padded"] = lab.store(StoreSettings("padded", sequence_length=T, **options))
    arms = {
        a: data.studies.open_arm(a, 2, T, lab.corpus, lab.tokenizer, stores)
        for a in data.studies.ARMS
    }
    online = arms["studies' padding-free"].next()
    offline = arms["studies' token-list"].next()
    assert online[0].shape == online[1].shape == (2, T)
    first = online[0][0].tolist()
    # BOS by the loop, and by the tokenizer
    assert first[:2] == [0, 0] == offline[0][0].tolist()[:2]
    masked = online[1][0][np.array(first) == 0]
    assert (masked == -100).all()
    assert (
        arms["studies' padded"].next()[0].tolist()
        == arms["studies' pretokenized-padded"].next()[0].tolist()
    )


def test_ratios_are_of_the_same_round():
    seconds = {"packed": (1.0, 4.0, 1.0), "memcpy": (1.0, 2.0, 4.0)}
    records = [
        {"arm": a, "round": n, "seconds": s, "batches": 1}
        for a, v in seconds.items()
        for n, s in enumerate(v)
    ]
    assert data.Table({"records": records}).ratio("packed", "memcpy") == (1.0, 0.25, 2.0)


def test_nothing_is_timed_where_a_pair_differs(lab, tmp_path, monkeypatch):
    rows = PaddedStore.rows

    def wrong(self, indices):
        tokens, labels = rows(self, indices)
        return tokens + (np.arange(tokens.shape[1]) == 3), labels

    monkeypatch.setattr(PaddedStore, "rows", wrong)
    monkeypatch.setattr(data.Sources, "record", lambda *a: pytest.fail("timed"))
    settings = DataBenchmarkSettings(sequence_length=T, rows=2, batches=2, rounds=1)
    with pytest.raises(UserError, match="different batches"):
        data.measure(
            settings, lab.corpus, lab.tokenizer, lab.directory / "tokens", tmp_path / "out.json"
        )
    assert not (tmp_path / "out.json").exists()


def test_storage_has_a_record_a_round_for_each_store_and_engine(lab, tmp_path, capsys):
    output = tmp_path / "benchmarks" / "out.json"
    output.parent.mkdir()
    settings = {
        "dtypes": ["int32"],
        "codecs": ["none"],
        "row_group_rows": [4],
        "sequence_length": T,
        "rounds": 2,
    }
    settings |= {"engines": ["tokenizers", "tiktoken"]}
    arguments = ["--settings", json.dumps(settings), "--corpus", str(lab.corpus / "manifest.json")]
    arguments += ["--tokenizer", str(lab.tokenizer / "manifest.json"), "--output", str(output)]
    assert main(["benchmark", "storage", *arguments]) == 0
    result = json.loads(output.read_text())
    printed = capsys.readouterr().out
    stores = [
        "padded-sequence_length=16-codec=none-row_group_rows=4",
        "token-list-codec=none-row_group_rows=4",
    ]
    engines = dict.fromkeys([f"text, {result['engine']}", "text, tokenizers"])
    found = sorted((r["round"], r["store"]) for r in result["records"])
    assert found == sorted(
        (n, s) for n in range(2) for s in [*stores, "packed-sequence_length=16", *engines]
    )
    assert (
        "tiktoken" in result["left_out"]["text, tiktoken"] and "left out: text, tiktoken" in printed
    )
    assert all(name in printed for name in [*stores, *engines])
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.json"]


# -- the DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_counts_the_batches_timed_and_the_first_is_opening(lab, workers):
    run = make_run("pretokenized-padded", sequence_length=T, global_batch=3)
    before = multiprocessing.active_children()  # servers of other tests

    def make():
        time.sleep(0.3)
        return BatchStream(run, Inputs(store=lab.store(run.store)))

    record = measure_loader(make, 9, workers)
    batches = lab.batches(run)
    batches.next()  # opening
    useful = sum(batches.next().useful_tokens for _ in range(9))
    assert (
        len(record["batch_s"]) == 9
        and record["seconds"] == sum(record["batch_s"])
        and record["open_s"] > 0.3
    )
    assert min(record["batch_s"]) <= record["median_batch_s"] <= max(record["batch_s"])
    assert (record["useful_tokens"], record["total_tokens"]) == (useful, 9 * 3 * T)
    assert set(multiprocessing.active_children()) <= set(before)


class Unsteady(IterableDataset):
    def __iter__(self):
        batch = torch.full((1, 4), 0 if get_worker_info() is None else 1)
        while True:
            yield {"input_ids": batch, "labels": torch.zeros_like(batch)}


def test_other_batches_are_not_timed():
    with pytest.raises(UserError, match="1 workers and none give different batches"):
        measure_loader(Unsteady, 2, 1)


class Counting:
    def __init__(self):
        self._number = -1

    def next(self):
        self._number += 1
        batch = torch.full((2, 4), self._number)
        return batch, batch, 8, 8


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_readers_sequence_is_kept(workers):
    loader = iter(DataLoader(AnyReader(Counting), batch_size=None, num_workers=workers))
    found = [next(loader) for _ in range(10)]
    assert [int(batch["input_ids"][0, 0]) for batch in found] == list(range(10))
    assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in found)
