"""Open the batches and the held-out rows of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, unknown
from tokenscale.data.batches.batch import (
    Batches,
    ChangedBatches,
    Inputs,
    count_labels,
    document_ids,
)
from tokenscale.data.batches.objectives import OBJECTIVES, UNCHANGED, open_change
from tokenscale.data.batches.stored import OPENERS, Opener, open_streamed
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.mixtures import list_sources, manifest_path
from tokenscale.data.order.permutation import rank_slots
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import open_store, read_store_manifest
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings import registry
from tokenscale.settings.data import LOST
from tokenscale.settings.extensions import load_extension
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: Inputs) -> Batches:
    """Open a rank's share of the run's global batches, at step 0.

    Online approaches need corpus and tokenizer; a store, if the approach reads one, is compared with
    corpus and tokenizer if they are given. Offline, no tokenizer package is imported. The objective
    `masked` reads the tokenizer's manifest. Raises UserError for missing, changed or
    unsuitable inputs.
    """
    if run.approach not in BATCHES:
        raise unknown(
            "approach",
            word=run.approach,
            words=BATCHES,
            run=run.identity,
        )
    openers = OPENERS
    if run.online:
        # with the tokenizers, which are no code of other runs
        from tokenscale.data.batches import online

        openers = online.OPENERS
    inputs = replace(inputs, losses=[])
    batches = _find_opener(run, openers)(run, inputs)
    if not isinstance(batches, Batches):
        raise UserError(
            "an own approach opens no batches.",
            approach=run.approach,
            found=type(batches).__name__,
            next="return tokenscale.data.batches.batch.Batches, such as RowBatches",
        )
    change = open_change(
        run, inputs, manifests=_read_manifests(run, inputs) if run.labels == "target" else []
    )
    batches = (
        batches
        if change is UNCHANGED
        else ChangedBatches(
            batches=batches,
            change=change,
            run=run,
            inputs=inputs,
        )
    )
    batches.lost = {
        share: max(found[share] for found in inputs.losses) for share in LOST if inputs.losses
    }
    return batches


def _find_opener(run: RunSettings, openers: Mapping[str, Opener]) -> Opener:
    """Return the function that opens the batches of the run's approach."""
    if run.approach in openers:
        return openers[run.approach]
    if any(own.name == run.approach and own.kind == "token_format" for own in run.extensions):
        return open_streamed
    return load_extension(run.approach, "approach")


def count_labelled_rows(
    run: RunSettings, inputs: Inputs, most: int = 256
) -> tuple[int, int] | None:
    """Return (rows with at least one label, rows) of the first global batches; None where every row
    has labels.

    `labels: target` leaves none where a source fills its row, `objective: masked` none in a row
    without ordinary text.
    """
    changed = run.objective in OBJECTIVES or registry.OBJECTIVES[run.objective].rows is not None
    if run.labels == "all" and not changed:
        return None
    batches = open_batches(run, inputs=replace(inputs, rank=0, world_size=1))
    labelled = 0
    rows = 0
    while rows < most:
        labels = batches.next().labels_bt
        labelled += int((labels != IGNORED).any(axis=1).sum())
        rows += len(labels)
    return labelled, rows


def _read_manifests(run: RunSettings, inputs: Inputs) -> list[dict[str, Any]]:
    """Return the facts of each source that `open_change` reads."""
    user = "labels: target"
    if run.store is not None:
        stores = list_sources(run, where=inputs.require("store", run, user))
        return [read_store_manifest(where) for where in stores]
    tokenizer = read_tokenizer_manifest(inputs.require("tokenizer", run, user))
    corpora = [
        read_corpus_manifest(manifest_path(where).parent)
        for where in list_sources(run, where=inputs.require("corpus", run, user))
    ]
    return [tokenizer | {"document_parts": corpus.get("pairs")} for corpus in corpora]


@dataclass(frozen=True)
class HeldOutSlice:
    """A rank's share of the held-out slice: tokens and labels, int64 [rows, T].

    `global_rows` counts all ranks. `document_ids_bt`, int32 [rows, T], is set where attention stays
    inside documents (`RunSettings.masks_validation`). `corpus` is the name of the rows' corpus,
    `count` that of `RowChange`.
    """

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    global_rows: int
    document_ids_bt: np.ndarray | None = None
    corpus: str = ""
    count: Callable[[np.ndarray], int] = count_labels


def load_held_out(run: RunSettings, inputs: Inputs, vocabulary_size: int) -> list[HeldOutSlice]:
    """Load a rank's share of the first rows of the packed validation store, which are stored
    shuffled.

    With a mixture there is one slice for each of its corpora. The objective `masked` chooses masked
    tokens by row number, equally in every run, and reads the tokenizer's manifest. Raises UserError
    if the store is missing, changed, or does not match the run.
    """
    sources = list_sources(
        run, where=inputs.require("validation_store", run, "validation"), held_out=True
    )
    assert run.validation_store is not None  # as in every run with a validation
    slices = []
    for where, corpus in zip(sources, run.corpora, strict=True):
        manifest = open_store(
            where,
            expected=run.validation_store,
            requested_by=run.identity,
            tokenizer_name=run.tokenizer.name,
            vocabulary_size=vocabulary_size,
        )
        store = PackedStore(where, manifest)
        rows = min(run.validation.rows, len(store))
        numbers = np.array(
            rank_slots(rows, rank=inputs.rank, world_size=inputs.world_size), dtype=np.int64
        )
        tokens_bt, labels_bt = store.rows(numbers)
        change = open_change(
            run,
            inputs,
            manifests=[manifest],
            held_out=True,
        )
        tokens_bt, labels_bt = change.apply(tokens_bt, labels_bt, numbers)
        ids = document_ids(store.starts(numbers)) if run.masks_validation else None
        slices.append(
            HeldOutSlice(
                tokens_bt=tokens_bt,
                labels_bt=labels_bt,
                global_rows=rows,
                document_ids_bt=ids,
                corpus=corpus.name,
                count=change.count,
            )
        )
    return slices
