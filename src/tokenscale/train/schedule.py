"""Learning rate by step: a pure function."""

import math

from tokenscale.settings.run import ScheduleSettings


def learning_rate(step: int, steps: int | None, peak: float, schedule: ScheduleSettings, share: float = 0.0) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`; where those are not known, by `share`, the part of
    the budget (useful tokens, wall time) that is behind us.

    Warm-up is linear: step 0 uses peak / warmup_steps, the last warm-up step the peak. Afterwards constant, or down
    to `floor * peak`, which the last step reaches; by `share`, counted from the peak on, it comes as near to it as the
    last step begins to the end of the budget.

    >>> s = ScheduleSettings(shape="linear", warmup_steps=4, floor=0.1)
    >>> [round(learning_rate(k, 7, 1.0, s), 3) for k in range(7)]
    [0.25, 0.5, 0.75, 1.0, 0.7, 0.4, 0.1]
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.shape == "constant":
        return peak
    if steps is None:
        done = min(share, 1.0)
    else:  # position between the peak (the last warm-up step, or step 0 without warm-up) and the last step
        start = max(warmup - 1, 0)
        done = min((step - start) / max(steps - 1 - start, 1), 1.0)
    left = 1 - done if schedule.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.floor + (1 - schedule.floor) * left)
