"""Simulate how often the report calls equal cells faster or slower, in the order of the design and
under drift, with carry-over from run to run and with looks between, and how often it finds a cell
that is 5 % faster.

python tests/benchmarks/verdicts.py   # about 15 minutes on one core: a row a drift and number of repeats
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tokenscale.referee import statistics
from tokenscale.report.paired_comparisons import Pair, judge
from tokenscale.settings.experiments import Canary, Experiment, order_runs

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
#: share by which a run behind one of the first compared cell is slower
CARRY_OVER = 0.05
#: numbers of repeats at which a campaign is looked at
LOOKS = ((6, 8), (6, 8, 10), (6, 9, 13), (8, 10, 12), tuple(EFFECT_REPEATS))


def simulate(
    family: int,
    repeats: int,
    noise: str,
    scale: float,
    drift: float,
    campaigns: int,
    order_seed: int = 0,
    effect: float = 1.0,
    carry_over: float = 0.0,
    looks: Sequence[int] = (),
    canary: bool = False,
) -> tuple[float, float]:
    """Return the shares of campaigns with a comparison that is called faster, and slower.

    A campaign has `family` cells and their baseline, whose runs start in the order of one design.
    `scale` is that of the noise; throughput falls linearly by the share `drift` from the first run
    to the last. Every cell is `effect` times as fast as the baseline. A run that follows one of the
    first compared cell is slower by the share `carry_over`; each campaign then has an order of its
    own. `looks` are earlier numbers of repeats, after each of which a verdict stops the campaign.
    With a `canary`, the baseline also runs first and last, in no pair.
    """
    random = np.random.default_rng([family, repeats])
    wrong = np.zeros(2)
    for campaign in range(campaigns):
        if not campaign or carry_over:
            order = draw_order(family, repeats, order_seed + campaign, canary)
        places = np.linspace(0.0, 1.0, len(order))
        values = np.exp(scale * NOISE[noise](random, len(order))) * (1 - drift * places)
        values *= [effect if cell else 1.0 for cell, _ in order]
        values[1:] *= [1 - carry_over if cell == 1 else 1.0 for cell, _ in order[:-1]]
        for look, until in enumerate((*looks, repeats), 1):
            done = [i for i, (_, k) in enumerate(order) if k < until]
            words = judge_runs([order[i] for i in done], values[done], places[done], look)
            found = [any(w.startswith(start) for w in words) for start in ("faster", "slower")]
            if any(found):
                wrong += found
                break
    return wrong[0] / campaigns, wrong[1] / campaigns


def draw_order(
    family: int, repeats: int, order_seed: int, canary: bool = False
) -> list[tuple[int, int]]:
    """Return (cell, repeat) of each run in the order of a design; cell 0 is the baseline, which as
    the `canary` also runs first and last.
    """
    factors = {"micro_batch": list(range(family + 1))}
    ends = Canary(cell={"micro_batch": 0}, every=(family + 1) * repeats)
    design = Experiment(
        question="",
        runs={},
        factors=factors,
        repeats=repeats,
        order_seed=order_seed,
        canary=ends if canary else None,
    )
    return [(cell["micro_batch"], repeat) for cell, repeat in order_runs(design)]


def judge_runs(
    order: Sequence[tuple[int, int]], values: np.ndarray, places: np.ndarray, look: int
) -> list[str]:
    """Return the verdict of each cell against the baseline at this look."""
    started = {f"{cell} {k}": place for (cell, k), place in zip(order, places, strict=True)}
    runs: dict[int, dict] = defaultdict(dict)
    for (cell, k), value in zip(order, values, strict=True):
        runs[cell][k] = f"{cell} {k}", value
    pairs = [
        Pair(
            of="",
            over="",
            names=("", ""),
            at="",
            quantity="useful_tokens_per_s",
            values=runs[cell],
            bases=runs[0],
            refused={},
            looks=look,
        )
        for cell in sorted(runs)[1:]
    ]
    found = statistics.drift(places, values, [cell for cell, _ in order])
    return [judged.verdict for judged in judge(pairs, found, started)]


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


def tabulate_carry_over(campaigns: int) -> Iterator[str]:
    """Yield lines of a Markdown table: equal cells, of which one slows the run behind it."""
    yield f"| comparisons | repeats | canary | faster, at {100 * CARRY_OVER:g} % (%) | slower (%) |"
    yield "|---|---|---|---|---|"
    cases = (*((1, n) for n in EFFECT_REPEATS), (3, 8))
    for (family, repeats), canary in itertools.product(cases, (False, True)):
        found = simulate(
            family=family,
            repeats=repeats,
            noise="normal",
            scale=EFFECT_SCALE,
            drift=0.0,
            campaigns=campaigns,
            carry_over=CARRY_OVER,
            canary=canary,
        )
        yield (
            f"| {family} | {repeats} | {'first' if canary else 'none'} | {100 * found[0]:.1f} | "
            f"{100 * found[1]:.1f} |"
        )


def tabulate_looks(campaigns: int) -> Iterator[str]:
    """Yield lines of a Markdown table: equal cells, to which repeats are added until a verdict."""
    yield "| looks after repeats | faster (%) | slower (%) |"
    yield "|---|---|---|"
    for looks in LOOKS:
        found = 100 * np.mean(
            [
                simulate(
                    family=1,
                    repeats=looks[-1],
                    noise=noise,
                    scale=EFFECT_SCALE,
                    drift=0.0,
                    campaigns=campaigns,
                    looks=looks[:-1],
                )
                for noise in NOISE
            ],
            axis=0,
        )
        yield f"| {', '.join(map(str, looks))} | {found[0]:.1f} | {found[1]:.1f} |"


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
    for table in (tabulate_power, tabulate_carry_over, tabulate_looks, tabulate):
        for line in table(campaigns):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
