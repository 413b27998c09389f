"""Loaders in real use, each as its own documentation says to use it, as functions for `tokenscale audit`.

`python loaders.py` audits all of them, writes audits.json beside itself, and prints the table of README.md. Run it from
a checkout, with src/ and the checkout itself in PYTHONPATH, and with the packages that `PACKAGES` names.

The text: 481 samples of 20 to 128 ids, all ids distinct, so that an id names its sample and its place. Rows have 128
positions; a loader of whole samples pads them with 0. Where a library packs, it gets the same samples.
"""

import dataclasses
import functools
import json
import os
import platform
import random
import sys
import tempfile
import time
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


def mosaicml_streaming(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    """MosaicML's StreamingDataset over a local MDS folder, with its StreamingDataLoader."""
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    if "torchvision" not in sys.modules:  # for datasets of pictures, which nothing here reads
        names = ("", ".datasets", ".transforms", ".transforms.functional")
        stubs = {f"torchvision{name}": ModuleType(f"torchvision{name}") for name in names}
        for name, stub in stubs.items():
            stub.__spec__ = ModuleSpec(name, None)
        stubs["torchvision.datasets"].VisionDataset = object
        stubs["torchvision.transforms.functional"].to_tensor = None
        sys.modules.update(stubs)
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base import dataset as of_dataset
    from streaming.base import util

    folder = FOLDER / "mds"
    if not (folder / "index.json").exists():
        with MDSWriter(out=str(folder), columns={"input_ids": "ndarray:int32"}) as out:
            for sample in _samples():
                out.write({"input_ids": np.array(sample, dtype=np.int32)})
    # each rank is the only one of its node, and no process group waits for the others
    of_dataset.maybe_init_dist = util.maybe_init_dist = lambda: False
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    util.clean_stale_shared_memory()
    dataset = StreamingDataset(
        local=str(folder),
        shuffle=True,
        shuffle_seed=9176 + seed,
        num_canonical_nodes=1,
        batch_size=batch_size,
    )
    dataset.next_epoch = epoch
    return StreamingDataLoader(dataset, batch_size=batch_size, collate_fn=pad)


def megatron_gpt_dataset(rank=0, world_size=1, seed=0, step=0, batch_size=24):
    """Megatron's GPTDataset over an indexed dataset; each rank its part of the global batch, as
    MegatronPretrainingSampler deals it out. It goes on from pass to pass.
    """
    from types import SimpleNamespace

    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = FOLDER / "megatron" / "text"
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        written = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=np.uint16)
        for sample in _samples():
            written.add_document(torch.tensor(sample), [len(sample)])
        written.finalize(str(prefix.with_suffix(".idx")))
    facts = {"vocab_size": 65_001, "unique_identifiers": {"class": "numbers"}}
    tokenizer = SimpleNamespace(eod=65_000, pad=PAD, **facts)
    config = GPTDatasetConfig(
        random_seed=1234 + seed,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1",
        tokenizer=tokenizer,
        path_to_cache=str(FOLDER / "megatron" / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples_wanted = [100 * 24, 0, 0]
    of_split = builder.BlendedMegatronDatasetBuilder(
        GPTDataset, samples_wanted, lambda: True, config
    )
    dataset = of_split.build()[0]
    while (step + 1) * batch_size * world_size <= len(dataset):
        first = step * batch_size * world_size + rank * batch_size
        rows = [dataset[place] for place in range(first, first + batch_size)]
        yield torch.stack([r["tokens"] for r in rows]), torch.stack([r["labels"] for r in rows])
        step += 1


class nanochat_best_fit:  # noqa: N801  # named as the other loaders are
    """nanochat's best fit of documents behind a BOS, as `base_train` calls it, from the checkout that
    NANOCHAT names. No seed; the state is the place of the last row group that was read.
    """

    def __init__(self, rank=0, world_size=1, batch_size=24):
        self._ranks = (world_size > 1, rank, rank, world_size)
        self._size = batch_size
        self._state = None

    def get_bos_token_id(self):
        return 65_000

    def encode(self, texts, prepend, num_threads):
        return [[prepend, *map(int, text.split())] for text in texts]

    def state_dict(self):
        return self._state

    def load_state_dict(self, state):
        self._state = state

    def __iter__(self):
        import pyarrow as pa
        import pyarrow.parquet as pq

        sys.path.insert(0, os.environ["NANOCHAT"])
        from nanochat import dataloader

        files = [FOLDER / f"nanochat-{name}.parquet" for name in ("train", "val")]
        texts = [" ".join(map(str, sample)) for sample in _samples()]
        for file in files:  # the last one is held out
            pq.write_table(pa.table({"text": texts}), file, row_group_size=20)
        dataloader.list_parquet_files = lambda **_: [str(file) for file in files]
        dataloader.get_dist_info = lambda: self._ranks
        batches = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit(
            self, self._size, LENGTH, "train", device="cpu", resume_state_dict=self._state
        )
        for inputs, targets, self._state in batches:
            yield inputs.clone(), targets.clone()


#: loader → the package whose version is stated
PACKAGES: dict[Callable, str] = {
    torch_distributed_sampler: "torch",
    torch_distributed_sampler_without_set_epoch: "torch",
    torchdata_stateful: "torchdata",
    datasets_streaming: "datasets",
    transformers_flattening: "transformers",
    litdata_streaming: "litdata",
    nanogpt_random_crops: "torch",
    mosaicml_streaming: "mosaicml-streaming",
    megatron_gpt_dataset: "megatron-core",
    nanochat_best_fit: "nanochat",
    tokenscale_packed: "tokenscale",
    tokenscale_token_list: "tokenscale",
}
#: commit of nanochat, which is no package
NANOCHAT_VERSION = "92d63d4"
ROUNDS = 5


def count_stored_bytes():
    """Return loader → bytes of the ids as it stores them; None of one that stores text."""
    arrow = _dataset().data.nbytes
    folders = {
        litdata_streaming: "litdata",
        mosaicml_streaming: "mds",
        tokenscale_packed: "packed/tokens",
        tokenscale_token_list: "token-list/tokens",
    }
    found = dict.fromkeys(PACKAGES, arrow)
    for make, name in folders.items():
        files = (FOLDER / name).rglob("*")
        found[make] = sum(file.stat().st_size for file in files if file.is_file())
    files = (FOLDER / "megatron").glob("text.*")
    found[megatron_gpt_dataset] = sum(file.stat().st_size for file in files)
    found[nanogpt_random_crops] = 2 * sum(map(len, _samples()))
    found[nanochat_best_fit] = None
    return found


def time_resume(loader):
    """Return the seconds from nothing to the first batch behind half of the batches; None where a
    loader has neither a state nor an argument `step`.
    """
    opened = loader.open(rank=0)
    batches = iter(opened)
    for _ in range(10):
        next(batches)
    state = opened.state_dict() if hasattr(opened, "state_dict") else None
    if state is None and not loader.takes("step"):
        return None
    start = time.perf_counter()
    again = loader.open(rank=0, **({} if state is not None else {"step": 10}))
    if state is not None:
        again.load_state_dict(state)
    next(iter(again))
    return time.perf_counter() - start


def time_rounds(settings):
    """Return loader → tokens a second of one rank, and → seconds of a resume, in rounds that
    alternate between the loaders.
    """
    from tokenscale.data.audit import Loader, read_pass, time_loader

    opened = {make: Loader(make, settings) for make in PACKAGES}
    passes = {make: read_pass(loader, 1) for make, loader in opened.items()}
    found = {make: [] for make in PACKAGES}
    resumed = {make: [] for make in PACKAGES}
    for number in range(ROUNDS):
        order = list(PACKAGES) if number % 2 else list(reversed(PACKAGES))
        for make in order:
            found[make].append(time_loader(opened[make], passes[make])["tokens_per_s"])
            resumed[make].append(time_resume(opened[make]))
    return found, resumed


def main():
    from tokenscale import __version__
    from tokenscale.data.audit import TITLES, AuditSettings, audit

    torch.set_num_threads(1)
    settings = AuditSettings(vocabulary_size=65_536, pad_id=PAD, most_batches=60)
    audits = {make: audit(make, settings, samples()) for make in PACKAGES}
    speeds, resumed = time_rounds(settings)
    stored = count_stored_bytes()
    tokens = sum(map(len, _samples()))
    record = {"python": platform.python_version(), "machine": platform.machine(), "loaders": {}}
    for make, package in PACKAGES.items():
        known = {"tokenscale": __version__, "nanochat": NANOCHAT_VERSION}
        stated = known.get(package) or version(package)
        record["loaders"][make.__name__] = {
            "what": make.__doc__,
            "version": f"{package} {stated}",
            "tokens_per_s": speeds[make],
            "resume_s": resumed[make],
            "bytes_per_token": stored[make] and round(stored[make] / tokens, 2),
            **dataclasses.asdict(audits[make]),
        }
    path = Path(__file__).with_name("audits.json")
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(
        "| loader | version | " + " | ".join(TITLES) + " | tokens/s | resume (ms) | bytes/token |"
    )
    print("|---" * (len(TITLES) + 5) + "|")
    for name, of in record["loaders"].items():
        answers = " | ".join(each["answer"].replace("not checked", "–") for each in of["verdicts"])
        speed = max(of["tokens_per_s"])  # other work of the machine only slows down
        seconds = [*filter(None, of["resume_s"])]
        resume = f"{1000 * min(seconds):.3g}" if seconds else "–"
        size = "–" if of["bytes_per_token"] is None else of["bytes_per_token"]
        print(f"| `{name}` | {of['version']} | {answers} | {speed:,} | {resume} | {size} |")


if __name__ == "__main__":
    sys.exit(main())
