"""Length of a run, its epochs, and its learning rate by step: arithmetic of its settings."""

import math
from fractions import Fraction

from tokenscale.settings.run import BudgetSettings, ScheduleSettings


def steps_of(
    budget: BudgetSettings,
    *,
    rows_per_epoch: Fraction | float,
    global_batch: int,
    flops_per_row: float,
) -> int | None:
    """Return the optimizer steps of a budget that fixes them in advance; None for useful tokens and
    for wall time.
    """
    if budget.epochs is not None:
        return count_steps(budget.epochs, rows_per_epoch, global_batch=global_batch)
    if budget.flops is not None:
        return math.ceil(budget.flops / (flops_per_row * global_batch))
    return budget.steps if budget.kind == "steps" else None


def count_steps(epochs: float, rows_per_epoch: Fraction | float, global_batch: int) -> int:
    """Return the steps of so many passes, at least 1. Epochs count as the decimals that were
    written: 1.1 passes over 100 rows are 110 rows, and not one more (1.1 * 100 > 110 as floats).

    >>> count_steps(1.1, rows_per_epoch=100, global_batch=1)
    110
    """
    return max(1, math.ceil(Fraction(str(epochs)) * Fraction(rows_per_epoch) / global_batch))


def epoch_ends(step: int, rows_per_epoch: Fraction | float, global_batch: int) -> bool:
    """Return whether an epoch ends in step `step` (from 0): its last row is read in it.

    >>> [epoch_ends(k, rows_per_epoch=10, global_batch=4) for k in range(5)]
    [False, False, True, False, True]
    """
    return (step + 1) * global_batch // rows_per_epoch > step * global_batch // rows_per_epoch


def learning_rate(
    step: int, steps: int | None, peak: float, schedule: ScheduleSettings, share: float = 0.0
) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`; where those are not known, by
    `share`, the part of the budget (useful tokens, wall time) that is behind us.

    Warm-up is linear: step 0 uses peak / warmup_steps, the last warm-up step the peak. Afterwards
    constant, or down to `floor * peak`, which the last step reaches and later ones keep; by
    `share`, counted from the peak on, it comes as near to it as the last step begins to the end of
    the budget.

    >>> s = ScheduleSettings(shape="linear", warmup_steps=4, floor=0.1)
    >>> [round(learning_rate(k, 7, 1.0, s), 3) for k in range(8)]
    [0.25, 0.5, 0.75, 1.0, 0.7, 0.4, 0.1, 0.1]
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.shape == "constant":
        return peak
    if steps is None:
        done = min(share, 1.0)
    # position between the peak (the last warm-up step, or step 0 without warm-up) and the last step
    else:
        start = max(warmup - 1, 0)
        done = min((step - start) / max(steps - 1 - start, 1), 1.0)
    left = 1 - done if schedule.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.floor + (1 - schedule.floor) * left)
