"""Batches of translation pairs in which only the target is predicted, by a causal language model.

A pair is one document: BOS + source + EOS + target + EOS. Text never becomes a control id, so rows of every format show
where a target begins: after the first EOS that follows a BOS.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch, Batches, BatchInputs, WrappedBatches
from tokenscale.data.batches.stored import corpus_manifest
from tokenscale.data.batches.streams import list_sources
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings.run import RunSettings


def ignore_sources(tokens_bt: np.ndarray, labels_bt: np.ndarray, bos_id: int, eos_id: int) -> None:
    """Set the labels of sources and of the EOS after them to −100, in place; int64 [n, T]. A row that begins inside a
    document longer than a row is assumed to begin with a target.
    """
    positions = np.arange(tokens_bt.shape[1])
    begun = np.maximum.accumulate(np.where(tokens_bt == bos_id, positions, -1), axis=1)
    ended = np.maximum.accumulate(np.where(tokens_bt == eos_id, positions, -1), axis=1)
    labels_bt[begun > ended] = IGNORED


class TargetBatches(WrappedBatches):
    """Batches in which only target tokens are predicted and counted as useful."""

    def __init__(self, batches: Batches, bos_id: int, eos_id: int):
        super().__init__(batches)
        self._ids = bos_id, eos_id

    def next(self) -> Batch:
        """Return this rank's share of the next global batch."""
        batch = self._batches.next()
        ignore_sources(batch.tokens_bt, batch.labels_bt, *self._ids)
        return replace(batch, useful_tokens=int(np.count_nonzero(batch.labels_bt != IGNORED)))


def wrap_batches(batches: Batches, run: RunSettings, inputs: BatchInputs) -> TargetBatches:
    """Wrap the batches of an approach for `labels: target`. Raises UserError as `prepare_held_out` does."""
    if run.store is not None:
        manifests = [read_store_manifest(where) for where in list_sources(run, inputs.store)]
    else:
        corpora = [read_corpus_manifest(corpus_manifest(where).parent) for where in list_sources(run, inputs.corpus)]
        tokenizer = read_tokenizer_manifest(inputs.tokenizer)
        manifests = [tokenizer | {"document_parts": corpus.get("pairs")} for corpus in corpora]
    (ids,) = {_read_ids(manifest, run) for manifest in manifests}
    return TargetBatches(batches, *ids)


def prepare_held_out(tokens_bt: np.ndarray, labels_bt: np.ndarray, manifest: dict[str, Any], run: RunSettings) -> None:
    """Ignore the labels of sources in held-out rows, in place. Raises UserError for documents that are not pairs, or
    one id for BOS and EOS.
    """
    ignore_sources(tokens_bt, labels_bt, *_read_ids(manifest, run))


def _read_ids(manifest: dict[str, Any], run: RunSettings) -> tuple[int, int]:
    """Return (BOS id, EOS id). Raises UserError as `prepare_held_out` does."""
    if not manifest.get("document_parts"):
        raise UserError(
            "labels: target needs pairs, but the documents are not pairs.",
            run=run.identity,
            corpus=run.corpus.name,
            key="labels",
            next="set `target_column` or `target_files` of the corpus' source, or labels: all",
        )
    if manifest["bos_id"] == manifest["eos_id"]:
        raise UserError(
            "labels: target needs different ids for BOS and EOS, but the tokenizer has one for both.",
            run=run.identity,
            tokenizer=f"{run.tokenizer.name}, id {manifest['bos_id']}",
            next="use another tokenizer (kind bpe trains one on the corpus), or labels: all",
        )
    return manifest["bos_id"], manifest["eos_id"]
