"""Our stores and batches in other people's loops: the same rows, the same global batches, whatever
reads them.
"""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.corpora import make_run, make_store
from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Inputs, document_ids
from tokenscale.data.batches.torch_data import (
    BatchStream,
    GlobalOrderSampler,
    StoreDataset,
)
from tokenscale.data.stores.manifest import load_reader, open_store
from tokenscale.settings.run import APPROACHES

pytestmark = [
    pytest.mark.slow(30),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]
T = 16
STORED = ["packed", "pretokenized-padded", "token-list"]


def store_of(lab, approach):
    settings = make_run(approach, sequence_length=T).store
    folder = lab.store(settings)
    return folder, load_reader(settings.format)(folder, open_store(folder, settings))


def stream_of(lab, run, rank=0, world_size=1, **options):
    store = lab.store(run.store) if run.store else None
    return BatchStream(
        run, Inputs(lab.corpus, lab.tokenizer, store, None, rank, world_size), **options
    )


def same(found, batch):
    arrays = {"input_ids": batch.tokens_bt, "labels": batch.labels_bt}
    return all(torch.equal(found[name], torch.from_numpy(array)) for name, array in arrays.items())


@pytest.mark.parametrize("approach", STORED)
def test_item_i_is_row_i_of_the_store_or_document_i(lab, approach):
    folder, store = store_of(lab, approach)
    items = list(StoreDataset(folder))
    assert len(items) == len(StoreDataset(str(folder))) == len(store)
    if approach == "token-list":
        columns = {"input_ids": [store.document(i) for i in range(len(store))]}
    else:
        columns = dict(zip(("input_ids", "labels"), store.rows(np.arange(len(store))), strict=True))
    for i, item in enumerate(items):
        assert {name: values.tolist() for name, values in item.items()} == {
            n: c[i].tolist() for n, c in columns.items()
        }
        assert all(values.dtype == torch.int64 for values in item.values())


def test_bounds_come_on_request_and_only_from_packed_rows(lab):
    folder, store = store_of(lab, "packed")
    found = torch.stack([row["document_ids"] for row in StoreDataset(folder, bounds=True)])
    assert found.dtype == torch.int32 and int(found.max()) > 0
    assert found.numpy().tolist() == document_ids(store.starts(np.arange(len(store)))).tolist()
    with pytest.raises(UserError, match="packed"):
        StoreDataset(store_of(lab, "token-list")[0], bounds=True)


@pytest.mark.parametrize("approach", STORED)
def test_items_are_of_their_own_memory(lab, approach):
    dataset = StoreDataset(store_of(lab, approach)[0])
    whole = [row["input_ids"].clone() for row in dataset]
    for i in range(len(dataset)):
        for item in dataset.__getitems__([i, (i + 1) % len(dataset)]):
            for values in item.values():
                values.fill_(-7)
    assert all(
        torch.equal(row["input_ids"], wanted) for row, wanted in zip(dataset, whole, strict=True)
    )
    again = dataset.__getitems__([0, 0])
    again[0]["input_ids"].fill_(-7)
    assert torch.equal(again[1]["input_ids"], whole[0])


@pytest.mark.parametrize("approach", STORED)
def test_a_pickle_holds_a_place_not_the_data_and_rows_that_do_not_exist_are_an_index_error(
    lab, approach
):
    dataset = StoreDataset(store_of(lab, approach)[0])
    closed = len(pickle.dumps(dataset))
    first = dataset[0]["input_ids"]
    assert len(pickle.dumps(dataset)) == closed
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0]["input_ids"], first)
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[i]


def test_changed_and_missing_stores_and_ranks_that_would_read_nothing_are_refused(lab, tmp_path):
    folder = make_store(tmp_path, lab.corpus, lab.tokenizer, "packed-sequence_length=16")
    data = folder / "tokens.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(UserError, match="token store"):
        StoreDataset(folder)
    with pytest.raises(UserError, match="read nothing"):
        GlobalOrderSampler(100, 4, world_size=5)
    stream = BatchStream(
        make_run("packed", sequence_length=T), Inputs(store=lab.directory / "nowhere")
    )
    with pytest.raises(UserError, match="nowhere"):  # where the iteration begins
        next(iter(DataLoader(stream, batch_size=None)))


def test_a_forked_process_opens_files_of_its_own(lab, monkeypatch):
    dataset = StoreDataset(store_of(lab, "packed")[0])
    dataset[0]
    here = dataset._store()
    assert dataset._store() is here
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert dataset._store() is not here


def loader_of(dataset, rank=0, world_size=1, step=0, seed=5, **options):
    order = GlobalOrderSampler(len(dataset), 6, seed=seed, rank=rank, world_size=world_size)
    order.load_state_dict({"step": step})
    return DataLoader(dataset, batch_sampler=order, **options)


def ours(lab, approach, **options):
    return lab.batches(make_run(approach, sequence_length=T, global_batch=6, seed=5), **options)


@pytest.mark.parametrize("approach", ["packed", "pretokenized-padded"])
def test_a_loader_reads_our_global_batches_at_any_world_size_with_any_number_of_workers(
    lab, approach
):
    dataset = StoreDataset(store_of(lab, approach)[0])
    dataset[0]  # open here, before workers are forked or spawned
    for world_size, workers in ((1, 0), (1, 3), (2, 0), (5, 0), (6, 0)):
        loaders = (
            loader_of(dataset, rank, world_size, num_workers=workers) for rank in range(world_size)
        )
        ranks = zip(*loaders, strict=True)
        batches = ours(lab, approach)
        for parts in itertools.islice(ranks, 80):  # over the end of a block of the order
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            assert same(whole, batches.next())


def test_the_state_is_the_step_and_resumes_at_another_world_size(lab):
    dataset = StoreDataset(store_of(lab, "packed")[0])
    order = GlobalOrderSampler(len(dataset), 6, seed=5, rank=1, world_size=4)
    assert order.state_dict() == {"step": 0}
    for _ in zip(range(70), DataLoader(dataset, batch_sampler=order), strict=False):
        pass
    state = json.loads(json.dumps(order.state_dict()))
    assert state == {"step": 70}
    batches = ours(lab, "packed")
    batches.seek(state)
    first = batches.next().copy()
    other = GlobalOrderSampler(len(dataset), 6, seed=5)
    other.load_state_dict(state)
    assert same(next(iter(DataLoader(dataset, batch_sampler=other))), first)
    going = iter(other)
    next(going)
    other.load_state_dict({"step": 3})  # in the middle of an iteration, too
    batches.seek({"step": 3})
    wanted = batches.next()
    assert same(torch.utils.data.default_collate(dataset.__getitems__(next(going))), wanted)
    assert other.state_dict() == {"step": 4}


def test_a_stream_can_be_spawned(lab):
    run = make_run("packed", sequence_length=T, global_batch=5)
    loader = DataLoader(
        stream_of(lab, run), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    batches = lab.batches(run)
    assert all(same(batch, batches.next()) for batch in itertools.islice(loader, 5))


@pytest.mark.parametrize("approach", APPROACHES)
def test_a_stream_goes_on_from_states_of_another_world_size_with_any_number_of_workers(
    lab, approach
):
    run = make_run(approach, sequence_length=T, global_batch=7)
    ranks = [
        iter(DataLoader(stream_of(lab, run, rank=r, world_size=3), batch_size=None))
        for r in range(2)
    ]
    ranks.append(
        iter(DataLoader(stream_of(lab, run, rank=2, world_size=3), batch_size=None, num_workers=2))
    )
    plain = [lab.batches(run, rank, 3) for rank in range(3)]
    for _ in range(4):
        found = [next(rank) for rank in ranks]
        assert all(same(batch, batches.next()) for batch, batches in zip(found, plain, strict=True))
    stream = stream_of(lab, run, steps=6)
    batches = lab.batches(run)
    stream.load_state_dict(json.loads(json.dumps(found[0]["state"])))
    for workers in (0, 3):  # every iteration begins where the state says
        found = list(DataLoader(stream, batch_size=None, num_workers=workers))
        assert len(found) == 6
        batches.seek({"step": 4})
        for batch in found:
            assert same(batch, wanted := batches.next()) and batch["state"] == batches.state()
            counts = wanted.useful_tokens, wanted.total_tokens, wanted.order_digest
            assert (batch["useful_tokens"], batch["total_tokens"], batch["order_digest"]) == counts
