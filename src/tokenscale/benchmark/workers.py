"""Batches that worker processes of torch's DataLoader read ahead."""

import os
import warnings
from collections.abc import Callable

from torch.utils.data import DataLoader

from tokenscale.data.batches.batch import Batch, Inputs
from tokenscale.data.batches.torch_data import BatchStream
from tokenscale.settings.run import RunSettings


def open_loader(run: RunSettings, inputs: Inputs) -> Callable[[], Batch]:
    """Return a function that takes the next batch of a DataLoader with `reader.workers` workers.

    The loop does nothing between batches, so what it times is the throughput of the loader, not the
    wait of a training.
    """
    workers = run.reader.workers or 0
    with warnings.catch_warnings():
        # more workers than cores are intended
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            BatchStream(run, inputs=inputs, steps=run.budget.steps),
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_limit_threads if workers else None,
        )
        batches = iter(loader)

    def take() -> Batch:
        batch = next(batches)
        return Batch(
            batch["input_ids"].numpy(),
            batch["labels"].numpy(),
            batch["useful_tokens"],
            batch["total_tokens"],
            batch["order_digest"],
        )

    return take


def _limit_threads(worker: int) -> None:
    """Disable tokenizers' threads, which do not survive a fork and would block forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
