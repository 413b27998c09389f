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
    """Time `batches` batches of a DataLoader for each number of workers. Returns one record per number.

    `make` returns new arguments of the loader, such as {"dataset": BatchStream(…), "batch_size": None} or {"dataset":
    StoreDataset(…), "batch_sampler": GlobalOrderSampler(…)}, and must give the same batches each time. The loop does
    nothing between batches, so `batch_s` measures the loader's throughput, not the wait of a training.

    `open_s` contains `make`, the start of the workers and the first batch, which is not timed. Workers read ahead
    meanwhile, so few batches look too fast: use many more than two per worker. `start_method` is that of
    multiprocessing (None: the system's default). An untimed first pass warms the page cache and counts tokens. Raises
    UserError if the last batch of a timed pass differs from its last batch.
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
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores are intended
        batches = iter(DataLoader(**make(), **options))
    for _ in range(count):
        yield next(batches)


def _limit_threads(worker: int) -> None:
    """Disable tokenizers' threads, which do not survive a fork and would block forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class InterleavedRounds(IterableDataset[dict[str, torch.Tensor]]):
    """Dataset of any reader for a DataLoader with `batch_size` None. Worker w of W yields batches w, w + W, …

    `opened()` returns a reader whose `next()` returns (tokens, labels, …), int64 tensors [rows, T] that it does not
    reuse. Readers cannot seek, so each worker also reads the batches that it skips.
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
