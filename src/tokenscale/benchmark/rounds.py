"""Interleaved rounds, their statistics and tables, for all benchmarks."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tokenscale.data.order.permutation import permute

Arm = TypeVar("Arm")


def interleave(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """Yield (round, arm): every arm once a round, in an order that changes, so that drift affects
    all arms equally.
    """
    for number in range(rounds):
        for i in permute(
            np.arange(len(arms)),
            n=len(arms),
            seed=0,
            epoch=number,
        ).tolist():
            yield number, arms[i]


def group_by(records: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Return the records by the value of a field, or by the tuple of the values of several fields.

    >>> group_by([{"arm": "a", "s": 1}, {"arm": "b", "s": 2}, {"arm": "a", "s": 3}], "arm")["a"]
    [{'arm': 'a', 's': 1}, {'arm': 'a', 's': 3}]
    """
    found: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record.get(name) for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(record)
    return found


def format_spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median and the range of the rounds.

    >>> format_spread([1.0, 4.0, 2.0]), format_spread([])
    ('2.00 (1.00 – 4.00)', '–')
    """
    if not len(values):
        return "–"
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def format_columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the columns of a table: the first `left` columns at the left, the others at the
    right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)
