"""Simulated times of steps: drift, autocorrelation and outliers at the noise of published logs."""

import numpy as np

#: median and 90th percentile of a step's deviation from its run's median
MEDIAN = 0.008
P90 = 0.03


def simulate(generator: np.random.Generator, steps: int, change: float = 0.0) -> np.ndarray:
    """Return seconds of steps: drift within ± 3 % of the run, AR(1) noise of 0 to 0.7, 3 %
    outliers, a slow start.
    """
    correlation = generator.uniform(0, 0.7)
    noise = generator.normal(size=steps)
    for at in range(1, steps):
        noise[at] = correlation * noise[at - 1] + (1 - correlation**2) ** 0.5 * noise[at]
    noise *= np.where(generator.random(steps) < 0.3, 0.0235, 0.0083)
    outliers = np.where(generator.random(steps) < 0.03, generator.exponential(0.5, steps), 0.0)
    drift = generator.uniform(-0.02, 0.02) * np.linspace(0, 1, steps)
    seconds = 0.4 * (1 + change) * np.exp(noise + drift) * (1 + outliers)
    seconds[0] *= 10
    return seconds
