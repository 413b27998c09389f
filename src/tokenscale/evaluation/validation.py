"""Loss on the fixed held-out slice: the same rows for every approach, layout and step."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tokenscale.formats.manifest import open_store
from tokenscale.formats.packed import PackedStore
from tokenscale.models.losses import cross_entropy_sum
from tokenscale.order.shares import share
from tokenscale.parallel.world import World
from tokenscale.settings.run import RunSettings


@dataclass(frozen=True)
class Slice:
    """This rank's rows of the held-out slice: tokens and labels [rows, T], int64."""

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    global_rows: int


def read_slice(run: RunSettings, directory: Path, vocabulary_size: int, world: World) -> Slice:
    """The first rows of the packed validation store (its rows are stored shuffled), shared among the ranks.

    Raises UserError when the store is missing, changed, or not the one that the run asks for.
    """
    manifest = open_store(
        directory,
        run.validation_store,
        asked_by=run.identity,
        tokenizer_name=run.tokenizer.name,
        vocabulary_size=vocabulary_size,
    )
    store = PackedStore(directory, manifest)
    rows = min(run.validation.rows, len(store))
    mine = share(rows, world.rank, world.size)
    tokens_bt, labels_bt = store.rows(np.arange(mine.start, mine.stop))
    return Slice(tokens_bt, labels_bt, rows)


@torch.no_grad()
def loss(model: nn.Module, data: Slice, micro_batch: int, world: World, autocast) -> tuple[float, int]:
    """(sum of the loss in nats, useful labels) over the whole slice. A collective: every rank must call it."""
    total, useful = 0.0, 0
    for start in range(0, len(data.tokens_bt), micro_batch):
        tokens = torch.from_numpy(data.tokens_bt[start : start + micro_batch]).to(world.device)
        labels = torch.from_numpy(data.labels_bt[start : start + micro_batch]).to(world.device)
        with autocast():
            total += cross_entropy_sum(model(tokens), labels).item()
        useful += int((data.labels_bt[start : start + micro_batch] >= 0).sum())
    loss_sum, count = world.sum(total, float(useful))
    return loss_sum, int(count)
