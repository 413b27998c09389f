"""Benchmark of reading batches with worker processes of `torch.utils.data.DataLoader`."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenscale.base.errors import UserError
from tokenscale.benchmark.machine import make_timing_record
from tokenscale.data.stores.documents import IGNORED

Dataset = IterableDataset[dict[str, torch.Tensor]]


def measure(make: Callable[[], Dataset], batches: int, workers: int) -> dict[str, Any]:
    """Time `batches` batches of a DataLoader over the dataset that `make` returns, which must be
    the same each time.

    The loop does nothing between batches, so `batch_s` measures the loader's throughput, not the
    wait of a training. `open_s` contains `make`, the start of the workers and the first batch,
    which is not timed. Workers read ahead meanwhile, so few batches look too fast: use many more
    than two per worker. An untimed first pass warms the page cache and counts tokens. Raises
    UserError if the last batch of the timed pass differs from its last batch.
    """
    counts = []
    for expected in _take_batches(make, count=batches + 1, workers=0):
        counts.append((int((expected["labels"] != IGNORED).sum()), expected["labels"].numel()))
    times = [time.perf_counter()]
    for last in _take_batches(make, count=batches + 1, workers=workers):  # noqa: B007
        times.append(time.perf_counter())
    if not all(torch.equal(last[name], expected[name]) for name in ("input_ids", "labels")):
        raise UserError(
            f"{workers} workers and none give different batches.",
            batch=batches,
            next="report a bug",
        )
    open_s, *batch_s = np.diff(times).tolist()
    return make_timing_record(open_s, batch_s, *np.sum(counts[1:], axis=0).tolist())


def _take_batches(
    make: Callable[[], Dataset], count: int, workers: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `count` batches; the workers end with the generator."""
    limit_threads = _limit_threads if workers else None
    with warnings.catch_warnings():
        # more workers than cores are intended
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        batches = iter(
            DataLoader(make(), batch_size=None, num_workers=workers, worker_init_fn=limit_threads)
        )
    for _ in range(count):
        yield next(batches)


def _limit_threads(worker: int) -> None:
    """Disable tokenizers' threads, which do not survive a fork and would block forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class AnyReader(Dataset):
    """Dataset of any reader. Worker w of W yields batches w, w + W, …

    `open_reader()` returns a reader whose `next()` returns (tokens, labels, …), int64 tensors
    [rows, T] that it does not reuse. Readers cannot seek, so each worker also reads the batches
    that it skips.
    """

    def __init__(self, open_reader: Callable[[], Any]):
        self._open_reader = open_reader

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader = self._open_reader()
        for number in itertools.count():
            tokens, labels, *_ = reader.next()
            if number % workers == worker:
                yield {"input_ids": tokens, "labels": labels}
