"""Loaders in real use, each as its own documentation says to use it, as functions for `tokenscale audit`.

`python loaders.py` audits all of them, writes audits.json beside itself, and prints the table of README.md. Run it from
a checkout, with src/ and the checkout itself in PYTHONPATH, and with the packages that `PACKAGES` names.

The text: 481 samples of 20 to 128 ids, all ids distinct, so that an id names its sample and its place. Rows have 128
positions; a loader of whole samples pads them with 0. Where a library packs, it gets the same samples.
"""

import dataclasses
import functools
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

LENGTH = 128
PAD = 0
FOLDER = Path(tempfile.gettempdir()) / "loaders-text"


@functools.cache
def _samples():
    draw = random.Random(0)
    lengths = [draw.randint(20, LENGTH) for _ in range(481)]
    first = 1
    found = []
    for length in lengths:
        found.append(list(range(first, first + length)))
        first += length
    return found


def samples():
    return _samples()


def pad(batch):
    """Return samples as rows: the collate function of an ordinary script."""
    ids = torch.full((len(batch), LENGTH), PAD)
    labels = torch.full((len(batch), LENGTH), -100)
    for row, sample in enumerate(batch):
        ids[row, : len(sample["input_ids"])] = torch.as_tensor(sample["input_ids"])
        labels[row, : len(sample["input_ids"])] = torch.as_tensor(sample["input_ids"])
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != PAD).long()}


@functools.cache
def _dataset():
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": _samples()})


def torch_distributed_sampler(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """Hugging Face datasets with torch's DistributedSampler, set_epoch before each epoch."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(_dataset(), world_size, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return DataLoader(_dataset(), batch_size, sampler=sampler, collate_fn=pad)


def torch_distributed_sampler_without_set_epoch(rank=0, world_size=1, seed=0, batch_size=24):
    """The same without the call that its documentation warns about."""
    return torch_distributed_sampler(rank, world_size, 0, seed, batch_size)


class _Stream:
    """A streaming dataset and its state, in batches."""

    def __init__(self, dataset, batch_size):
        self._dataset = dataset
        self._size = batch_size

    def __iter__(self):
        batch = []
        for sample in self._dataset:
            batch.append(sample)
            if len(batch) == self._size:
                yield pad(batch)
                batch = []
        if batch:
            yield pad(batch)

    def state_dict(self):
        return self._dataset.state_dict()

    def load_state_dict(self, state):
        self._dataset.load_state_dict(state)


def datasets_streaming(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """datasets' IterableDataset: shuffle with a buffer, split_dataset_by_node, set_epoch, state_dict."""
    from datasets.distributed import split_dataset_by_node

    stream = _dataset().to_iterable_dataset(num_shards=24)
    stream = stream.shuffle(seed=seed, buffer_size=100)
    part = split_dataset_by_node(stream, rank, world_size)
    part.set_epoch(epoch)
    return _Stream(part, batch_size)


def transformers_flattening(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """transformers' DataCollatorWithFlattening: samples of a batch in one row, with their positions."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler
    from transformers import DataCollatorWithFlattening

    sampler = DistributedSampler(_dataset(), world_size, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    collate = DataCollatorWithFlattening()
    for batch in DataLoader(_dataset(), batch_size, sampler=sampler, collate_fn=collate):
        yield {
            "input_ids": batch["input_ids"],
            "labels": batch["labels"],
            "document_ids": (batch["position_ids"] == 0).long().cumsum(1),
        }


def torchdata_stateful(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """torchdata's StatefulDataLoader with its StatefulDistributedSampler."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(
        _dataset(), num_replicas=world_size, rank=rank, shuffle=True, seed=seed
    )
    sampler.set_epoch(epoch)
    return StatefulDataLoader(_dataset(), batch_size=batch_size, sampler=sampler, collate_fn=pad)


def nanogpt_random_crops(rank=0, world_size=1, seed=0, batch_size=24):
    """nanoGPT's get_batch: windows at random places of one file, seeded by the rank; no epoch."""
    data = np.concatenate([np.array(sample, dtype=np.uint16) for sample in _samples()])
    torch.manual_seed(1337 + seed + rank)
    while True:
        places = torch.randint(len(data) - LENGTH, (batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in places])
        y = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places]
        )
        yield x, y


def litdata_streaming(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """litdata's StreamingDataset over local chunks, with its StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize
    from litdata.utilities.env import _DistributedEnv

    folder = FOLDER / "litdata"
    if not (folder / "index.json").exists():
        optimize(
            fn=_write_sample,
            inputs=list(range(len(_samples()))),
            output_dir=str(folder),
            chunk_size=20,
            num_workers=1,
            start_method="fork",
        )
    dataset = StreamingDataset(str(folder), shuffle=True, seed=42 + seed, drop_last=False)
    dataset.distributed_env = _DistributedEnv(world_size, rank, 1)
    loader = StreamingDataLoader(dataset, batch_size=batch_size, collate_fn=pad, num_workers=0)
    dataset.set_epoch(1 + epoch)
    loader.current_epoch = epoch
    return loader


def _write_sample(number):
    return {"input_ids": np.array(_samples()[number])}


@functools.cache
def _ours(approach):
    from tests.corpora import make_corpus, make_store

    from tokenscale.data.tokenizers.load import build
    from tokenscale.settings.data import TokenizerSettings
    from tokenscale.settings.run import RunSettings

    folder = FOLDER / approach
    settings = TokenizerSettings(name="numbers", kind="numbers", vocabulary_size=65_000)
    run = RunSettings(
        approach=approach, tokenizer=settings, sequence_length=LENGTH, global_batch=24, eos=False
    )
    texts = [" ".join(str(i - 3) for i in sample) for sample in _samples() if sample[0] > 3]
    corpus = make_corpus(folder / "corpus", texts)
    build(settings, folder / "tokenizer", None)
    store = None
    if run.store is not None:
        store = make_store(folder / "tokens", corpus, folder / "tokenizer", run.store)
    return run, corpus, folder / "tokenizer", store


def _read_ours(approach, rank, world_size, seed, step):
    from dataclasses import replace

    from tokenscale.data.batches.batch import Inputs
    from tokenscale.data.batches.open import open_batches

    run, corpus, tokenizer, store = _ours(approach)
    inputs = Inputs(corpus, tokenizer, store, rank=rank, world_size=world_size)
    batches = open_batches(replace(run, seed=seed), inputs)
    batches.seek({"step": step})
    padding = 2  # of the tokenizer
    while True:
        batch = batches.next().copy()
        real = batch.tokens_bt != padding
        yield {"input_ids": batch.tokens_bt, "labels": batch.labels_bt, "attention_mask": real}


def tokenscale_packed(rank=0, world_size=1, seed=0, step=0):
    """The approach `packed` of this project; its batches go on from pass to pass."""
    return _read_ours("packed", rank, world_size, seed, step)


def tokenscale_token_list(rank=0, world_size=1, seed=0, step=0):
    """The approach `token-list` of this project; its batches go on from pass to pass."""
    return _read_ours("token-list", rank, world_size, seed, step)


#: loader → the package whose version is stated
PACKAGES: dict[Callable, str] = {
    torch_distributed_sampler: "torch",
    torch_distributed_sampler_without_set_epoch: "torch",
    torchdata_stateful: "torchdata",
    datasets_streaming: "datasets",
    transformers_flattening: "transformers",
    litdata_streaming: "litdata",
    nanogpt_random_crops: "torch",
    tokenscale_packed: "tokenscale",
    tokenscale_token_list: "tokenscale",
}
ROUNDS = 5


def time_rounds(settings):
    """Return loader → tokens a second of one rank, in rounds that alternate between the loaders."""
    from tokenscale.data.audit import Loader, read_pass, time_loader

    opened = {make: Loader(make, settings) for make in PACKAGES}
    passes = {make: read_pass(loader, 1) for make, loader in opened.items()}
    found = {make: [] for make in PACKAGES}
    for number in range(ROUNDS):
        order = list(PACKAGES) if number % 2 else list(reversed(PACKAGES))
        for make in order:
            found[make].append(time_loader(opened[make], passes[make])["tokens_per_s"])
    return found


def main():
    from tokenscale import __version__
    from tokenscale.data.audit import TITLES, AuditSettings, audit

    torch.set_num_threads(1)
    settings = AuditSettings(vocabulary_size=65_536, pad_id=PAD, most_batches=60)
    audits = {make: audit(make, settings, samples()) for make in PACKAGES}
    speeds = time_rounds(settings)
    record = {"python": platform.python_version(), "machine": platform.machine(), "loaders": {}}
    for make, package in PACKAGES.items():
        stated = __version__ if package == "tokenscale" else version(package)
        record["loaders"][make.__name__] = {
            "what": make.__doc__,
            "version": f"{package} {stated}",
            "tokens_per_s": speeds[make],
            **dataclasses.asdict(audits[make]),
        }
    path = Path(__file__).with_name("audits.json")
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print("| loader | version | " + " | ".join(TITLES) + " | tokens/s |")
    print("|---" * (len(TITLES) + 3) + "|")
    for name, of in record["loaders"].items():
        answers = " | ".join(each["answer"].replace("not checked", "–") for each in of["verdicts"])
        speed = sorted(of["tokens_per_s"])[ROUNDS // 2]
        print(f"| `{name}` | {of['version']} | {answers} | {speed:,} |")


if __name__ == "__main__":
    sys.exit(main())
