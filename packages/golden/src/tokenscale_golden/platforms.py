"""The same change on a second platform: a real one moves both alike, rounding each its own way."""

from dataclasses import dataclass

import numpy as np

from tokenscale_golden.reading import Curve

#: changes that correlate at least so much are alike, and at most so much apart
ALIKE = 0.7
APART = 0.3
#: fewest steps that tell, and the correlation that chance reaches at one step; it shrinks with the
#: root of the steps
FEWEST_STEPS = 10
OF_CHANCE = 3.0


@dataclass(frozen=True)
class Platform:
    """Losses of a second platform before and after the change."""

    old: Curve
    new: Curve


@dataclass(frozen=True)
class Movement:
    """How the changes of two platforms correlate, over so many common steps."""

    correlation: float
    steps: int

    @property
    def alike(self) -> bool:
        return self.correlation >= max(ALIKE, OF_CHANCE / self.steps**0.5)

    @property
    def apart(self) -> bool:
        return self.correlation <= APART

    def __str__(self) -> str:
        return f"changes correlate by {self.correlation:.2f} over {self.steps} steps"


def compare_movements(old: Curve, new: Curve, second: Platform) -> Movement | None:
    """Return how the change from `old` to `new` correlates with that of a second platform; None for
    too few common steps, or where one did not change.
    """
    curves = (old, new, second.old, second.new)
    tables = [dict(zip(curve.steps.tolist(), curve.loss, strict=True)) for curve in curves]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    losses = np.array([[table[step] for table in tables] for step in steps])
    if not len(losses):
        return None
    losses = losses[np.isfinite(losses).all(axis=1)]
    if len(losses) < FEWEST_STEPS:
        return None
    here = losses[:, 1] - losses[:, 0]
    there = losses[:, 3] - losses[:, 2]
    if not here.std() or not there.std():
        return None
    return Movement(correlation=float(np.corrcoef(here, there)[0, 1]), steps=len(losses))
