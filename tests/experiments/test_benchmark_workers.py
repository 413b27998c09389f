"""The DataLoader factor: what is timed, what is counted, and that nothing is timed that reads other batches."""

import multiprocessing
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.corpora import HOSTILE, Lab, make_run, texts_around
from tokenscale.base.errors import UserError
from tokenscale.benchmark.workers import InterleavedRounds, measure
from tokenscale.data.batches.torch_data import BatchStream, GlobalOrderSampler, StoreDataset

pytestmark = pytest.mark.experiment

T = 16


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), [*HOSTILE, *texts_around(T)], vocabulary_size=262)


def stream(lab, run):
    return {"dataset": BatchStream(run, store_directory=lab.store(run.store)), "batch_size": None}


def rows(lab, run):
    dataset = StoreDataset(lab.store(run.store))
    return {"dataset": dataset, "batch_sampler": GlobalOrderSampler(len(dataset), run.global_batch)}


@pytest.mark.parametrize("make", [stream, rows])
def test_a_record_for_each_number_of_workers_counts_the_batches_timed(lab, make):
    run = make_run("pretokenized-padded", sequence_length=T, global_batch=3)
    before = multiprocessing.active_children()  # servers of other tests
    records = measure(lambda: make(lab, run), 9)
    assert [record.pop("workers") for record in records] == [0, 1, 2, 4]
    batches = lab.batches(run)
    batches.next()  # opening
    useful = sum(batches.next().useful_tokens for _ in range(9))
    for record in records:
        assert record.keys() == {"open_s", "batch_s", "median_batch_s", "seconds", "useful_tokens", "total_tokens"}
        assert len(record["batch_s"]) == 9 and record["seconds"] == sum(record["batch_s"])
        assert min(record["batch_s"]) <= record["median_batch_s"] <= max(record["batch_s"])
        assert (record["useful_tokens"], record["total_tokens"]) == (useful, 9 * 3 * T)
    assert set(multiprocessing.active_children()) <= set(before)


def test_making_and_the_first_batch_are_opening(lab):
    run = make_run("packed", sequence_length=T)

    def make():
        time.sleep(0.3)
        return stream(lab, run)

    (record,) = measure(make, 3, workers=[0])
    assert record["open_s"] > 0.3 > record["seconds"]


def test_workers_are_as_many_as_the_record_says(lab, monkeypatch):
    started = []

    def recorded(**options):
        started.append(options.get("num_workers"))
        return DataLoader(**options)

    monkeypatch.setattr("tokenscale.benchmark.workers.DataLoader", recorded)
    run = make_run("packed", sequence_length=T)
    records = measure(lambda: stream(lab, run), 2, workers=[2, 0, 1])
    assert [record["workers"] for record in records] == [2, 0, 1]
    assert started == [None, 2, None, 1]


class Unsteady(IterableDataset):
    """Gives workers other batches than no workers."""

    def __iter__(self):
        batch = torch.full((1, 4), 0 if get_worker_info() is None else 1)
        while True:
            yield {"input_ids": batch, "labels": torch.zeros_like(batch)}


def test_other_batches_are_not_timed():
    with pytest.raises(UserError, match="1 workers and none give different batches"):
        measure(lambda: {"dataset": Unsteady(), "batch_size": None}, 2, workers=[0, 1])


class Counting:
    """A reader whose batches are its numbers."""

    def __init__(self):
        self._number = -1

    def next(self):
        self._number += 1
        batch = torch.full((2, 4), self._number)
        return batch, batch, 8, 8


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_readers_sequence_is_kept(workers):
    loader = iter(DataLoader(InterleavedRounds(Counting), batch_size=None, num_workers=workers))
    found = [next(loader) for _ in range(10)]
    assert [int(batch["input_ids"][0, 0]) for batch in found] == list(range(10))
    assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in found)
