"""Benchmark of reading batches with worker processes of `torch.utils.data.DataLoader`."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenscale.base.errors import UserError
from tokenscale.benchmark.machine import make_timing_record
from tokenscale.data.stores.labels import IGNORED

WORKERS = (0, 1, 2, 4)

Arguments = dict[str, Any]


def measure(
    make: Callable[[], Arguments],
    batches: int,
    workers: Sequence[int] = WORKERS,
    start_method: str | None = None,
) -> list[dict[str, Any]]:
    """Time so many batches through a DataLoader, once with each number of workers; one record each.

    `make` gives the loader's arguments anew, such as {"dataset": BatchStream(…), "batch_size": None} or {"dataset":
    StoreDataset(…), "batch_sampler": GlobalOrderSampler(…)}, and must give the same batches each time. Nothing works
    between two batches but this loop, so `batch_s` is what the loader can give, not what a training would wait.

    `open_s` holds `make`, the start of the workers and the first batch, which is not among the timed ones. Workers go
    on reading while the first batch comes, so that few batches look too fast: ask for many more than two a worker.
    `start_method` is that of multiprocessing (None: the system's). The first pass is not timed: it warms the page
    cache and counts tokens, and the last batch of each timed pass must equal its last; UserError where it does not.
    """
    counts = []
    for expected in _take_batches(make, batches + 1, {}):
        counts.append((int((expected["labels"] != IGNORED).sum()), expected["labels"].numel()))
    useful, total = np.sum(counts[1:], axis=0).tolist()
    records = []
    for number in workers:
        options: Arguments = {}
        if number:
            options = {"num_workers": number, "multiprocessing_context": start_method, "worker_init_fn": _limit_threads}
        times = [time.perf_counter()]
        for last in _take_batches(make, batches + 1, options):  # noqa: B007
            times.append(time.perf_counter())
        open_s, *batch_s = np.diff(times).tolist()
        if not all(torch.equal(last[name], expected[name]) for name in ("input_ids", "labels")):
            raise UserError(
                f"{number} workers and none give different batches.",
                batch=batches,
                next="report a bug",
            )
        records.append({"workers": number, **make_timing_record(open_s, batch_s, useful, total)})
    return records


def _take_batches(make: Callable[[], Arguments], count: int, options: Arguments) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `count` batches; the workers end with the generator."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores, on purpose
        batches = iter(DataLoader(**make(), **options))
    for _ in range(count):
        yield next(batches)


def _limit_threads(worker: int) -> None:
    """Disable tokenizers' threads, which do not survive a fork and would block forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class InterleavedRounds(IterableDataset[dict[str, torch.Tensor]]):
    """Any reader through a DataLoader (`batch_size` None), its sequence kept: worker w of W gives batches w, w + W, …

    `opened()` is a reader whose `next()` gives (tokens, labels, …), int64 tensors [rows, T] that it does not use again.
    It knows no steps, so each worker reads what it leaves out.
    """

    def __init__(self, opened: Callable[[], Any]):
        self._opened = opened

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader = self._opened()
        for number in itertools.count():
            tokens, labels, *_ = reader.next()
            if number % workers == worker:
                yield {"input_ids": tokens, "labels": labels}
