"""Token counts of a run, read again from the store or the text that it trained on."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import load_held_out, open_batches
from tokenscale.settings.run import RunSettings

#: positions that are read at most; of longer runs, steps at even distances
MOST_POSITIONS = 1 << 24


@dataclass(frozen=True)
class Recount:
    """Counts of global batches: int64 [steps] each, `digests` modulo 2**52."""

    steps: np.ndarray
    useful: np.ndarray
    total: np.ndarray
    digests: np.ndarray
    vocabulary_size: int
    rows_per_epoch: Fraction


def recount_steps(run: RunSettings, inputs: Inputs, first: int, stop: int) -> Recount:
    """Return the counts of steps `first` … `stop` - 1, as far as `MOST_POSITIONS` go.

    Raises UserError for inputs that are missing, changed or not those of the run.
    """
    batches = open_batches(run, inputs)
    most = max(1, MOST_POSITIONS // (run.global_batch * run.sequence_length))
    steps = np.arange(first, stop, dtype=np.int64)
    if len(steps) > most:
        steps = np.unique(np.linspace(first, stop - 1, most).astype(np.int64))
    counts = np.zeros((len(steps), 3), dtype=np.int64)
    following = 0
    for place, step in enumerate(steps.tolist()):
        if step != following:
            batches.seek({"step": step})
        batch = batches.next()
        following = step + 1
        counts[place] = batch.useful_tokens, batch.total_tokens, batch.order_digest
    return Recount(
        steps=steps,
        useful=counts[:, 0],
        total=counts[:, 1],
        digests=counts[:, 2],
        vocabulary_size=batches.vocabulary_size,
        rows_per_epoch=batches.rows_per_epoch(),
    )


def recount_held_out(
    run: RunSettings, inputs: Inputs, vocabulary_size: int
) -> dict[str, tuple[int, int]]:
    """Return corpus → (rows, useful tokens) of the held-out slices of a run. Raises UserError as
    `recount_steps`.
    """
    slices = load_held_out(run, inputs, vocabulary_size=vocabulary_size)
    return {
        held_out.corpus: (held_out.global_rows, held_out.count(held_out.labels_bt))
        for held_out in slices
    }
