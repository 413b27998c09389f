"""Open the batches and the held-out rows of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, unknown
from tokenscale.data.batches.batch import Batches, Inputs, document_ids
from tokenscale.data.batches.objectives import OBJECTIVES, prepare_target, wrap_target
from tokenscale.data.batches.stored import OPENERS
from tokenscale.data.batches.streams import list_sources
from tokenscale.data.order.permutation import rank_slots
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: Inputs) -> Batches:
    """Open a rank's share of the run's global batches, at step 0.

    Online approaches need corpus and tokenizer, offline approaches the store, which is compared with corpus and
    tokenizer if they are given; no tokenizer package is imported then. The objective `masked` reads the tokenizer's
    manifest. Raises UserError for missing, changed or unsuitable inputs.
    """
    if run.approach not in BATCHES:
        raise unknown("approach", run.approach, BATCHES, run=run.identity)
    openers = OPENERS
    if BATCHES[run.approach].format is None:
        from tokenscale.data.batches import online  # with the tokenizers, which are no code of other runs

        openers = online.OPENERS
    batches = openers[run.approach](run, inputs)
    if run.labels == "target":
        batches = wrap_target(batches, run, inputs)
    if run.objective in OBJECTIVES:
        batches = OBJECTIVES[run.objective][0](batches, run, inputs)
    return batches


@dataclass(frozen=True)
class HeldOutSlice:
    """A rank's share of the held-out slice: tokens and labels, int64 [rows, T].

    `global_rows` counts all ranks. `document_ids_bt`, int32 [rows, T], is set if the run uses a document mask. `corpus`
    is the name of the rows' corpus.
    """

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    global_rows: int
    document_ids_bt: np.ndarray | None = None
    corpus: str = ""


def load_held_out(run: RunSettings, inputs: Inputs, vocabulary_size: int) -> list[HeldOutSlice]:
    """Load a rank's share of the first rows of the packed validation store, which are stored shuffled.

    With a mixture there is one slice for each of its corpora. The objective `masked` chooses masked tokens by row
    number, equally in every run, and reads the tokenizer's manifest. Raises UserError if the store is missing, changed,
    or does not match the run.
    """
    if inputs.validation_store is None:
        raise UserError(
            "the run needs a validation store, but none was given.",
            run=run.identity,
            next=f"pass {list_manifests(run)['validation_store']}",
        )
    slices = []
    for where, corpus in zip(list_sources(run, inputs.validation_store, held_out=True), run.corpora, strict=True):
        manifest = open_store(
            where,
            run.validation_store,
            requested_by=run.identity,
            tokenizer_name=run.tokenizer.name,
            vocabulary_size=vocabulary_size,
        )
        store = PackedStore(where, manifest)
        rows = min(run.validation.rows, len(store))
        numbers = np.array(rank_slots(rows, inputs.rank, inputs.world_size), dtype=np.int64)
        tokens_bt, labels_bt = store.rows(numbers)
        tokens_bt, labels_bt = apply_objective(tokens_bt, labels_bt, numbers, manifest, run, inputs.tokenizer)
        ids = document_ids(store.starts(numbers)) if run.document_mask else None
        slices.append(HeldOutSlice(tokens_bt, labels_bt, rows, ids, corpus.name))
    return slices


def apply_objective(
    tokens_bt: np.ndarray,
    labels_bt: np.ndarray,
    numbers: np.ndarray,
    manifest: dict[str, Any],
    run: RunSettings,
    tokenizer_directory: Path | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, labels) of rows with the run's choice of labels and its objective applied.

    `numbers` are the rows' numbers, which determine masking. `manifest` is the store's, or has its keys document_parts,
    bos_id and eos_id.
    """
    if run.labels == "target":
        prepare_target(tokens_bt, labels_bt, manifest, run)
    if run.objective in OBJECTIVES:
        return OBJECTIVES[run.objective][1](tokens_bt, labels_bt, numbers, run, tokenizer_directory)
    return tokens_bt, labels_bt
