"""The batches of a run: finds the approach's file, and imports no other."""

import importlib
from pathlib import Path

from tokenscale.base.errors import unknown
from tokenscale.data.batches.batch import Batches
from tokenscale.settings.registry import BATCHES, LABELS, OBJECTIVES
from tokenscale.settings.run import RunSettings


def open_batches(
    run: RunSettings,
    *,
    corpus_directory: Path | None = None,
    tokenizer_directory: Path | None = None,
    store_directory: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    """One rank's view of the run's global batches, at step 0.

    Online approaches need the folders of the corpus and of the tokenizer, offline ones that of the store; offline, the
    other two are compared with the store where they are given, and no tokenizer package is imported. The objective
    `masked` reads the tokenizer's manifest. Raises UserError for what is missing, changed, or does not match the run.
    """
    if run.approach not in BATCHES:
        raise unknown("approach", run.approach, BATCHES, run=run.identity)
    module = importlib.import_module(BATCHES[run.approach].module)
    batches = module.open_batches(
        run,
        corpus_directory=corpus_directory,
        tokenizer_directory=tokenizer_directory,
        store_directory=store_directory,
        rank=rank,
        world_size=world_size,
    )
    if run.labels in LABELS:
        batches = importlib.import_module(LABELS[run.labels]).of_batches(
            batches, run, store_directory, corpus_directory, tokenizer_directory
        )
    module = OBJECTIVES[run.objective].module
    if module is None:
        return batches
    return importlib.import_module(module).of_batches(batches, run, tokenizer_directory, rank, world_size)
