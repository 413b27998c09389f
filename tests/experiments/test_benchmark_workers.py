"""The DataLoader factor: what is timed, what is counted, and that nothing is timed that reads other batches."""

import multiprocessing
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.corpora import HOSTILE, Lab, make_run, texts_around
from tokenscale.base.errors import UserError
from tokenscale.benchmark.workers import AnyReader, measure
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.torch_data import BatchStream

pytestmark = pytest.mark.experiment

T = 16


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_counts_the_batches_timed_and_the_first_is_opening(tmp_path, workers):
    lab = Lab(tmp_path, [*HOSTILE, *texts_around(T)], vocabulary_size=262)
    run = make_run("pretokenized-padded", sequence_length=T, global_batch=3)
    before = multiprocessing.active_children()  # servers of other tests

    def make():
        time.sleep(0.3)
        return BatchStream(run, Inputs(store=lab.store(run.store)))

    record = measure(make, 9, workers)
    batches = lab.batches(run)
    batches.next()  # opening
    useful = sum(batches.next().useful_tokens for _ in range(9))
    assert len(record["batch_s"]) == 9 and record["seconds"] == sum(record["batch_s"]) and record["open_s"] > 0.3
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
        measure(Unsteady, 2, 1)


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
