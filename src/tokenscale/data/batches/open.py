"""Open the batches of a run, importing only its approach."""

import importlib
from pathlib import Path

from tokenscale.base.errors import unknown
from tokenscale.data.batches.batch import Batches, BatchInputs
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
    """Open a rank's share of the run's global batches, at step 0.

    Online approaches need the folders of corpus and tokenizer, offline approaches the folder of the store. Offline,
    corpus and tokenizer are compared with the store if given, and no tokenizer package is imported. The objective
    `masked` reads the tokenizer's manifest. Raises UserError for missing, changed or unsuitable inputs.
    """
    if run.approach not in BATCHES:
        raise unknown("approach", run.approach, BATCHES, run=run.identity)
    inputs = BatchInputs(corpus_directory, tokenizer_directory, store_directory, rank, world_size)
    batches = importlib.import_module(BATCHES[run.approach].module).open_batches(run, inputs)
    if run.labels in LABELS:
        batches = importlib.import_module(LABELS[run.labels]).wrap_batches(batches, run, inputs)
    objective = OBJECTIVES[run.objective].module
    if objective is None:
        return batches
    return importlib.import_module(objective).wrap_batches(batches, run, inputs)
