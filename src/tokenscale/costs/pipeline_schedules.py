"""Pipeline schedules: the order of a rank's work, as lists."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from tokenscale.costs.flops import Convention, flops_per_token
from tokenscale.settings.model import ModelSettings


class Action(NamedTuple):
    """Action on micro-batch `micro` in the rank's stage number `chunk`. F: forward; B: backward.
    With a split backward pass, B computes the gradient of the input, which the previous stage waits
    for, and W that of the weights.
    """

    kind: str
    micro: int
    chunk: int = 0


def build_schedule(
    name: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1
) -> list[Action]:
    """Return the actions of rank `rank` of `ranks` in one step, in order.

    | name | from |
    |---|---|
    | `naive` | model parallelism: one micro-batch in the pipeline at a time |
    | `gpipe` | Huang et al. 2019: all forwards, then all backwards |
    | `1f1b` | PipeDream-flush (Narayanan et al. 2021): at most `ranks` micro-batches' activations |
    | `interleaved` | the same paper, section 2.2: `chunks` groups of layers a rank, the bubble divided by them |
    | `zero-bubble` | ZB-H1 (Qi et al. 2023): 1f1b's memory; weight gradients fill what would be waiting |
    """
    if name == "naive":
        return [Action(kind, micro) for micro in range(micro_batches) for kind in "FB"]
    if name == "gpipe":
        return [Action(kind, micro) for kind in "FB" for micro in range(micro_batches)]
    if name == "zero-bubble":
        return _zero_bubble(rank, ranks, micro_batches=micro_batches)
    if name == "1f1b":
        warm = min(ranks - rank - 1, micro_batches)
        return _alternate(
            warm,
            total=micro_batches,
            forward=lambda number: (number, 0),
            backward=lambda number: (number, 0),
        )
    if name == "interleaved":
        if micro_batches % ranks:
            raise ValueError(f"{micro_batches} micro-batches are not a multiple of {ranks} ranks")
        total = micro_batches * chunks
        # groups of `ranks` micro-batches pass through one chunk after the other
        micro = [number // (ranks * chunks) * ranks + number % ranks for number in range(total)]
        chunk = [number // ranks % chunks for number in range(total)]
        warm = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        return _alternate(
            warm,
            total,
            forward=lambda n: (micro[n], chunk[n]),
            backward=lambda n: (micro[n], chunks - 1 - chunk[n]),
        )
    raise ValueError(f"unknown schedule {name!r}")


def _alternate(
    warm: int,
    total: int,
    forward: Callable[[int], tuple[int, int]],
    backward: Callable[[int], tuple[int, int]],
) -> list[Action]:
    """Return `warm` forwards, then alternating forwards and backwards, then the remaining
    backwards.
    """
    found = [Action("F", *forward(number)) for number in range(warm)]
    for number in range(warm, total):
        found += [Action("F", *forward(number)), Action("B", *backward(number - warm))]
    return found + [Action("B", *backward(number)) for number in range(total - warm, total)]


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return 1f1b with delayed W: rank r defers r weight gradients and computes them where it would
    wait.
    """
    found: list[Action] = []
    done = 0
    for action in build_schedule(
        "1f1b",
        rank,
        ranks=ranks,
        micro_batches=micro_batches,
    ):
        found.append(action)
        if action.kind == "B" and action.micro - done >= rank:
            found.append(Action("W", micro=done))
            done += 1
    return found + [Action("W", micro) for micro in range(done, micro_batches)]


def max_in_flight(actions: list[Action]) -> int:
    """Return the largest number of forward passes whose activations a rank stores at once."""
    held = most = 0
    ends = "W" if any(a.kind == "W" for a in actions) else "B"
    for action in actions:
        held += (action.kind == "F") - (action.kind == ends)
        most = max(most, held)
    return most


def bubble_share(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the share of time that ranks wait, with equal stages and free transfers, by
    simulation.

    (p - 1) / (m + p - 1) for gpipe and 1f1b with p ranks and m micro-batches, and with v chunks (p
    - 1) / (v m + p - 1) for interleaved (Narayanan et al. 2021, sections 2.2.1 and 2.2.2); (p - 1)
    / p for naive. A backward pass takes twice the time of a forward pass, B and W half of it each.
    """
    orders = [
        build_schedule(
            name,
            rank,
            ranks=ranks,
            micro_batches=micro_batches,
            chunks=chunks,
        )
        for rank in range(ranks)
    ]
    cut = any(action.kind == "W" for action in orders[0])
    cost = {"F": 1.0 / chunks, "B": 2.0 / chunks / (2 if cut else 1), "W": 2.0 / chunks / 2}
    ended: dict[tuple[str, int, int], float] = {}  # (kind, micro, stage) → when
    clocks = [0.0] * ranks
    places = [0] * ranks
    last = ranks * chunks - 1
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        started = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, micro, chunk = order[places[rank]]
                stage = chunk * ranks + rank
                before = {
                    "F": ("F", micro, stage - 1) if stage else None,
                    "B": ("B", micro, stage + 1) if stage < last else ("F", micro, stage),
                    "W": ("B", micro, stage),
                }[kind]
                if before is not None and before not in ended:
                    break
                clocks[rank] = max(clocks[rank], ended[before] if before else 0.0) + cost[kind]
                ended[kind, micro, stage] = clocks[rank]
                places[rank] += 1
        if places == started:
            raise RuntimeError(
                f"{name} of {ranks} ranks and {micro_batches} micro-batches: each waits for another"
            )
    return 1 - micro_batches * 3.0 / max(clocks)


def assign_stages(model: ModelSettings, sequence_length: int, stages: int) -> list[range]:
    """Assign layers to stages, balanced by FLOPs; the last one also has the output head. Needs a
    vocabulary size.
    """
    head = 6 * model.resolved_vocabulary_size * model.dimension
    block = round(
        (flops_per_token(model, sequence_length, convention=Convention.FULL) - head) / model.layers
    )
    return partition_costs([block] * (model.layers - 1) + [block + head], stages)


def partition_costs(costs: list[int], stages: int) -> list[range]:
    """Partition consecutive items into nonempty ranges with the smallest maximum cost, and more
    items in the first.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers in {stages} stages")
    sums = [0, *accumulate(costs)]
    # best[n]: (cost of the most expensive, minus the ends of the stages) of the first n items
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        n: (sums[n], (-n,)) for n in range(1, len(costs) + 1)
    }
    for stage in range(2, stages + 1):
        best = {
            n: min(
                (max(best[cut][0], sums[n] - sums[cut]), (*best[cut][1], -n))
                for cut in range(stage - 1, n)
            )
            for n in range(stage, len(costs) + 1)
        }
    ends = [-end for end in best[len(costs)][1]]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
