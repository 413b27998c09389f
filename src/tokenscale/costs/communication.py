"""Time of collectives by the alpha-beta model: a latency per hop and a time per byte."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokenscale.base.errors import UserError

#: algorithm that determines the number of hops: around a ring, or down and up a tree
Latency = Literal["ring", "tree"]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Link:
    """Link between ranks: seconds per hop, and seconds per byte through a rank's own link (1 / bus
    bandwidth).
    """

    alpha_s: float
    beta_s_per_byte: float
    latency: Latency = "ring"


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes through each rank's link per byte of the buffer: 2 (N - 1) / N for all-reduce, half of
    it for its halves (nccl-tests, doc/PERFORMANCE.md; reached by rings: Patarasuk & Yuan 2009).
    """
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def hops(collective: str, ranks: int, latency: Latency) -> float:
    """Return the number of sequential messages. Ring: 2 (N - 1) for all-reduce, N - 1 for its
    halves (Thakur et al. 2005). Tree: 2 log2 N for all-reduce (Sanders, Speck & Träff 2009); its
    halves have no tree.
    """
    if latency == "tree" and collective == "all_reduce":
        return 2 * math.log2(ranks)
    return (2 if collective == "all_reduce" else 1) * (ranks - 1)


def bandwidths(
    collective: str, size_bytes: float, ranks: int, seconds: float
) -> tuple[float, float]:
    """Return (algorithm, bus) bandwidth in bytes/s, as nccl-tests defines them."""
    return size_bytes / seconds, size_bytes / seconds * bus_factor(collective, ranks)


def solve_nonnegative(columns: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solve least squares with constants of at least zero exactly, by trying every set of the few
    columns.

    `columns` [points, terms], `targets` [points]; returns [terms].
    """
    scale = np.linalg.norm(columns, axis=0)
    best = float(targets @ targets)
    found = np.zeros(len(scale))
    for size in range(1, len(scale) + 1):
        for chosen in map(list, itertools.combinations(np.flatnonzero(scale), size)):
            part = columns[:, chosen] / scale[chosen]
            constants = np.linalg.pinv(part) @ targets
            error = float(((part @ constants - targets) ** 2).sum())
            if (constants >= 0).all() and error < best * (1 - 1e-12):
                best = error
                found = np.zeros(len(scale))
                found[chosen] = constants / scale[chosen]
    return found


def fit_link(
    collective: str, sizes: Sequence[float], seconds: Sequence[float], ranks: int, latency: Latency
) -> tuple[Link, list[float]]:
    """Return (link, residuals) of a sweep over sizes in bytes: seconds = alpha x hops + beta x bus
    factor x bytes.

    Fitted by relative least squares; residuals are predicted over measured - 1. Raises UserError
    with one size.
    """
    if len(set(sizes)) < 2:
        following = "measure a second message size"
        raise UserError(
            "one message size cannot separate latency from bandwidth.",
            found=sizes[0],
            next=following,
        )
    laws = [
        [hops(collective, ranks, latency=latency), bus_factor(collective, ranks) * size]
        for size in sizes
    ]
    columns = np.asarray(laws) / np.asarray(seconds, dtype=float)[:, None]
    constants = solve_nonnegative(columns, targets=np.ones(len(sizes)))
    alpha, beta = map(float, constants)
    return Link(alpha_s=alpha, beta_s_per_byte=beta, latency=latency), [
        float(r) for r in columns @ constants - 1
    ]
