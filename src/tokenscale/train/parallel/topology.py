"""Nodes and devices of the ranks, compared before the first collective."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import Store

from tokenscale.base.errors import UserError

#: the line of NCCL's log that names the network between nodes; the second form since 2.27
NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.MULTILINE)


@dataclass(frozen=True)
class NodeDevice:
    """One rank's node and device."""

    node: str
    device: str


def node_device(device: torch.device, environment: Mapping[str, str] = os.environ) -> NodeDevice:
    """Return this rank's node and device. A GPU is named by its UUID; ranks on a CPU never share a device."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"process {os.getpid()}"
    return NodeDevice(environment.get("SLURMD_NODENAME") or platform.node(), name)


def exchange_devices(mine: NodeDevice, rank: int, size: int, store: Store) -> list[NodeDevice]:
    """Return the devices of all ranks, in their order. A collective."""
    store.set(f"spot/{rank}", "\n".join(asdict(mine).values()))
    found = store.multi_get([f"spot/{other}" for other in range(size)])
    return [NodeDevice(*text.decode().split("\n")) for text in found]


def check(devices_of_ranks: list[NodeDevice], nodes: int | None) -> None:
    """Raise UserError where two ranks share a device, or where ranks do not fill the requested nodes evenly.

    Such a run computes the right losses at a meaningless speed. `nodes` None: any number of nodes is accepted.
    """
    seen: dict[NodeDevice, int] = {}
    for rank, node_device in enumerate(devices_of_ranks):
        if node_device in seen:
            raise UserError(
                "two ranks have the same device.",
                ranks=f"{seen[node_device]} and {rank}",
                node=node_device.node,
                device=node_device.device,
                next="give each rank its own: srun --gpus-per-task=1, or LOCAL_RANK that counts on each node",
            )
        seen[node_device] = rank
    found = list(dict.fromkeys(node_device.node for node_device in devices_of_ranks))
    if nodes is None:
        return
    if len(found) != nodes:
        raise UserError(
            "the ranks are not on as many nodes as they should be.",
            expected=f"{nodes} nodes",
            found=f"{len(found)}: {', '.join(found)}",
            next="start it with `python -m tokenscale launch`, which spells every option of srun out",
        )
    each = len(devices_of_ranks) // nodes
    if any(node_device.node != found[rank // each] for rank, node_device in enumerate(devices_of_ranks)):
        raise UserError(
            "the ranks do not fill their nodes one after the other.",
            found=", ".join(f"{rank} on {node_device.node}" for rank, node_device in enumerate(devices_of_ranks)),
            expected=f"{each} neighbours on each of {nodes} nodes",
            next="srun --distribution=block, and as many tasks on every node",
        )


def reported_network(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the network between nodes that NCCL's log of this process names; None without a log or such a line."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:
        return None
    path = Path(pattern.replace("%p", str(os.getpid())))
    texts = [file.read_text(errors="replace") for file in path.parent.glob(path.name.replace("%h", "*"))]
    found = NETWORK.findall("\n".join(texts))
    return found[-1].strip() if found else None


def check_network(expected: str, found: str | None) -> None:
    """Raise UserError where NCCL uses another network than the expected one: TCP works, twenty times slower."""
    if found is None or expected.lower() not in found.lower():
        raise UserError(
            "NCCL does not use the expected network between nodes.",
            expected=expected,
            found=found or "no line about it in NCCL_DEBUG_FILE",
            next="look for its plugin in the container (aws-ofi-nccl), or change `network` in the machine's file",
        )
