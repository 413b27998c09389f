"""Stores and batches as classes of `torch.utils.data`, for training loops outside of tokenscale.

Labels are already shifted: label t is the token after token t, or −100 if ignored. Use them as in
`cross_entropy(logits.flatten(0, 1), labels.flatten())`. Do not pass them to models that shift
labels themselves, such as those of Hugging Face.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import BLOCK_STEPS, Inputs, document_ids
from tokenscale.data.batches.open import open_batches
from tokenscale.data.order.permutation import get_samples, rank_slots
from tokenscale.data.stores.manifest import load_reader, open_store, read_store_manifest
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FORMATS
from tokenscale.settings.run import RunSettings


class StoreDataset(Dataset[dict[str, torch.Tensor]]):
    """Map-style dataset of a token store's rows. `where` is its folder, or the path of its
    manifest.

    Row i of a `packed` or `padded` store is {"input_ids", "labels"}, int64 [T]. With `bounds`, a
    packed row also has "document_ids", int32 [T], the number of each token's piece. Row i of a
    `token-list` store is {"input_ids"}, int64: the whole document i. Items never share memory with
    the store. Each process that reads, forked or spawned, opens its own files. Raises UserError if
    the store is missing or changed.
    """

    def __init__(self, where: str | Path, *, bounds: bool = False):
        self.where = Path(where)
        self.bounds = bounds
        declared = read_store_manifest(self.where)
        if bounds and declared["format"] != "packed":
            what = "only rows of a packed store hold several documents."
            next_step = "leave `bounds` out, or read a packed store"
            raise UserError(
                what, store=f"{self.where} has the format {declared['format']}", next=next_step
            )
        self.manifest = open_store(
            self.where, expected=StoreSettings(declared["format"], **declared["options"])
        )
        self.vocabulary_size: int = self.manifest["vocabulary_size"]
        self._opened: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return several rows, read at once, for a DataLoader. Raises IndexError for a row that
        does not exist.
        """
        store = self._store()
        if FORMATS[self.manifest["format"]].streamed:
            return [
                {"input_ids": torch.from_numpy(store.document(int(i)).astype(np.int64))}
                for i in indices
            ]
        rows = np.asarray(indices, dtype=np.int64)
        columns = dict(zip(("input_ids", "labels"), store.rows(rows), strict=True))
        if self.bounds:
            columns["document_ids"] = document_ids(store.starts(rows))
        tensors = [torch.from_numpy(np.ascontiguousarray(values)) for values in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*tensors, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        # pickling a mapped file would copy all its bytes
        return self.__dict__ | {"_opened": (0, None)}

    def _store(self) -> Any:
        process, store = self._opened
        if process != os.getpid():
            store = load_reader(self.manifest["format"])(self.where, self.manifest)
            self._opened = (os.getpid(), store)
        return store


class GlobalOrderSampler(Sampler[list[int]]):
    """Endless sampler of rows in the global order, for `DataLoader(rows, batch_sampler=…)`.

    Yields one list per step, this rank's share of the global batch. Global batch k has the same
    rows at every world size, worker count and restart: they are a function of (seed, k), and an
    epoch has every row once.

    The state is {"step": k}, the next global batch to be sampled. A DataLoader with workers samples
    ahead of the loop. To resume it, count the batches in the loop and call
    `load_state_dict({"step": batches taken})`.
    """

    def __init__(
        self, rows: int, global_batch: int, *, seed: int = 0, rank: int = 0, world_size: int = 1
    ):
        if world_size > global_batch:
            what = "some ranks would read nothing."
            raise UserError(
                what, global_batch=global_batch, world_size=world_size, next="raise global_batch"
            )
        self._rows = rows
        self._global_batch = global_batch
        self._seed = seed
        self._slots = np.array(
            rank_slots(global_batch, rank, world_size=world_size), dtype=np.int64
        )
        self._step = 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            steps = np.arange(self._step, self._step + BLOCK_STEPS, dtype=np.int64)
            rows = get_samples(
                steps[:, None] * self._global_batch + self._slots[None, :],
                n=self._rows,
                seed=self._seed,
            )
            for step, indices in zip(steps.tolist(), rows.tolist(), strict=True):
                if step != self._step:  # a state was loaded
                    break
                self._step = step + 1
                yield indices

    def state_dict(self) -> dict[str, int]:
        """Return {"step": the next global batch to be sampled}."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = int(state["step"])


class BatchStream(IterableDataset[dict[str, Any]]):
    """A rank's shares of the global batches of a run of any approach, for `DataLoader(stream,
    batch_size=None)`.

    A batch is {"input_ids", "labels": int64 [rows, T], "useful_tokens", "total_tokens",
    "order_digest": int, "state": position of the next batch}. Its tensors are not reused. An
    iteration begins at step 0, or at the state given to `load_state_dict`: `batch["state"]` of the
    last trained batch, or {"step": k}. It ends after `steps` batches, or never.

    Worker w of W yields batches w, w + W, … and the DataLoader takes them in turn, so the sequence
    is the same with any number of workers.

    The inputs are opened, and errors are raised, when an iteration begins.
    """

    def __init__(self, run: RunSettings, inputs: Inputs, *, steps: int | None = None):
        self._run = run
        self._inputs = inputs
        self._steps = steps
        self._state: dict[str, Any] = {"step": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        batches = open_batches(self._run, inputs=self._inputs)
        step = self._state["step"] + worker
        end = math.inf if self._steps is None else self._state["step"] + self._steps
        while step < end:
            batches.seek({"step": step})
            batch = batches.next().copy()
            yield {
                "input_ids": torch.from_numpy(batch.tokens_bt),
                "labels": torch.from_numpy(batch.labels_bt),
                "useful_tokens": batch.useful_tokens,
                "total_tokens": batch.total_tokens,
                "order_digest": batch.order_digest,
                "state": batches.state(),
            }
            step += workers
