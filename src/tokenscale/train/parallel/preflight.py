"""Preflight of a run on several ranks: bus bandwidth inside nodes and between them, before the
first step.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tokenscale.base.errors import UserError
from tokenscale.train.parallel.world import World

#: bytes of the buffer on a GPU and on a CPU, and measured calls, of which the fastest counts
GPU_BYTES = 128 * 2**20
CPU_BYTES = 4 * 2**20
CALLS = 5


#: kind of link → what it joins, and what to look for if it is slow
LINKS = {
    "node": ("inside a node", 'try gpu_bind = "node", so that ranks see their peers\' GPUs'),
    "network": ("between nodes", "check the network's plugin and the nodes of this job"),
}


def check_links(world: World, least: dict[str, float]) -> World:
    """Measure the links and return the world with them. A collective over all ranks.

    `least` has the least GB/s of `node` and `network`; a kind that it lacks is measured, not
    compared. Raises UserError on every rank if a link is slower.
    """
    if world.size == 1:
        return world
    found = measure_links(world)
    for kind, limit in least.items():
        if kind in found and found[kind] < limit:
            joined, advice = LINKS[kind]
            raise UserError(
                f"the links {joined} are slower than the machine's file expects.",
                measured=f"{found[kind]:.3g} GB/s (bus bandwidth of an all-reduce, slowest group)",
                expected=f"at least {limit:g} GB/s (least_{kind}_gb_s)",
                nodes=", ".join(world.nodes),
                next=f"{advice}; or lower least_{kind}_gb_s in the machine's file",
            )
    return replace(world, links=found)


def measure_links(world: World) -> dict[str, float]:
    """Return GB/s of `node` and `network`, those that this run has, the same on every rank. A
    collective.

    Bus bandwidth of an all-reduce, 2 (n - 1) / n of the buffer over the time (nccl-tests): of the
    slowest group. Ranks fill nodes one after the other. Between nodes all groups of equal local
    ranks run at the same time, as in training.
    """
    nodes = max(1, len(world.nodes))
    each = world.size // nodes
    groups: dict[str, list[list[int]]] = {}
    if each > 1:
        groups["node"] = [list(range(n * each, (n + 1) * each)) for n in range(nodes)]
    if nodes > 1:
        groups["network"] = [list(range(k, world.size, each)) for k in range(each)]
    return {kind: _measure(world, members) / 1e9 for kind, members in groups.items()}


def _measure(world: World, members: list[list[int]]) -> float:
    """Return bytes/s of the slowest of these groups, which all run at once."""
    whole = len(members) == 1
    group = None if whole else dist.new_subgroups_by_enumeration(members)[0]
    count = len(members[0])
    buffer = new_buffer(world.device)
    fastest = time_all_reduce(buffer, barrier=world.barrier, group=group)
    slowest = torch.tensor(fastest, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if group is not None:
        dist.destroy_process_group(group)
    return bus_bandwidth(buffer, ranks=count, seconds=slowest.item())


def time_all_reduce(
    buffer: torch.Tensor, barrier: Callable[[], Any], group: object = None
) -> float:
    """Return the seconds of the fastest of some all-reduces of a buffer, each after a barrier. A
    collective.
    """
    fastest = float("inf")
    for call in range(1 + CALLS):  # the first one connects
        barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        if call:
            fastest = min(fastest, time.perf_counter() - began)
    return fastest


def bus_bandwidth(buffer: torch.Tensor, ranks: int, seconds: float) -> float:
    """Return the bytes/s of an all-reduce that every link carried: 2 (n - 1) / n of the buffer over
    the time.
    """
    return 2 * (ranks - 1) / ranks * buffer.nbytes / seconds


def new_buffer(device: torch.device) -> torch.Tensor:
    return torch.zeros((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
