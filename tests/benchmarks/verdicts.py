"""Simulate how often the report calls equal cells faster or slower, in the order of the design and
under drift, and how often it finds a cell that is 5 % faster.

python tests/benchmarks/verdicts.py   # about 15 minutes on one core: a row a drift and number of repeats
"""

import argparse
import itertools
from collections.abc import Iterator

import numpy as np

from tokenscale.analysis import statistics
from tokenscale.report.paired_comparisons import Pair, judge
from tokenscale.settings.experiments import Experiment, order_runs

#: distribution of the logarithm of a run's throughput: normal, heavy tails (t with 2 degrees of
#: freedom), one-sided
NOISE = {
    "normal": lambda random, size: random.normal(size=size),
    "heavy tails": lambda random, size: random.standard_t(2, size=size),
    "one side": lambda random, size: -random.exponential(size=size),
}
SCALES = (0.01, 0.05)
DRIFTS = (0.0, 0.1, 0.25)
#: (comparisons with one baseline, repeats)
FAMILIES = ((1, 6), (1, 7), (1, 8), (1, 10), (3, 7), (3, 8))
#: of the power: ratio of the faster cell, scale of the normal noise of a run, repeats
EFFECT = 1.05
EFFECT_SCALE = 0.03
EFFECT_REPEATS = range(6, 14)


def simulate(
    family: int,
    repeats: int,
    noise: str,
    scale: float,
    drift: float,
    campaigns: int,
    order_seed: int = 0,
    effect: float = 1.0,
) -> tuple[float, float]:
    """Return the shares of campaigns with a comparison that is called faster, and slower.

    A campaign has `family` cells and their baseline, whose runs start in the order of one design.
    `scale` is that of the noise; throughput falls linearly by the share `drift` from the first run
    to the last. Every cell is `effect` times as fast as the baseline.
    """
    random = np.random.default_rng([family, repeats])
    wrong = np.zeros(2)
    factors = {"micro_batch": list(range(family + 1))}
    design = Experiment(
        question="", runs={}, factors=factors, repeats=repeats, order_seed=order_seed
    )
    order = [(cell["micro_batch"], repeat) for cell, repeat in order_runs(design)]
    places = np.linspace(0.0, 1.0, len(order))
    started = {f"{cell} {k}": place for (cell, k), place in zip(order, places, strict=True)}
    for _ in range(campaigns):
        values = np.exp(scale * NOISE[noise](random, len(order))) * (1 - drift * places)
        values *= [effect if cell else 1.0 for cell, _ in order]
        found = statistics.drift(places, values, [cell for cell, _ in order])
        runs: list[dict] = [{} for _ in range(family + 1)]
        for (cell, k), value in zip(order, values, strict=True):
            runs[cell][k] = f"{cell} {k}", value
        pairs = [
            Pair("", "", ("", ""), "", "useful_tokens_per_s", of, runs[0], {}) for of in runs[1:]
        ]
        words = [judged.verdict for judged in judge(pairs, found, started)]
        wrong += [any(word.startswith(start) for word in words) for start in ("faster", "slower")]
    return wrong[0] / campaigns, wrong[1] / campaigns


def tabulate(campaigns: int) -> Iterator[str]:
    """Yield lines of a Markdown table: percentages over all kinds and scales of noise."""
    yield "| drift | comparisons | repeats | faster (%) | slower (%) | most of one noise (%) |"
    yield "|---|---|---|---|---|---|"
    for drift, (family, repeats) in itertools.product(DRIFTS, FAMILIES):
        settings = itertools.product(NOISE, SCALES)
        found = 100 * np.array(
            [simulate(family, repeats, *noise, drift, campaigns) for noise in settings]
        )
        faster, slower = found.mean(axis=0)
        most = found.sum(axis=1).max()
        yield (
            f"| {100 * drift:g} % | {family} | {repeats} | {faster:.1f} | {slower:.1f} | "
            f"{most:.1f} |"
        )


def tabulate_power(campaigns: int) -> Iterator[str]:
    """Yield lines of a Markdown table: campaigns that call a cell faster which is so by `EFFECT`."""
    yield f"| repeats | called faster, at {100 * (EFFECT - 1):.0f} % (%) |"
    yield "|---|---|"
    for repeats in EFFECT_REPEATS:
        faster, _ = simulate(
            family=1,
            repeats=repeats,
            noise="normal",
            scale=EFFECT_SCALE,
            drift=0.0,
            campaigns=campaigns,
            effect=EFFECT,
        )
        yield f"| {repeats} | {100 * faster:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks/verdicts.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--campaigns", type=int, default=1000, help="simulated campaigns of each setting"
    )
    campaigns = parser.parse_args().campaigns
    for line in itertools.chain(tabulate_power(campaigns), [""], tabulate(campaigns)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
