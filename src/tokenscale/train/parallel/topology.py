"""Where the ranks of a run came up: told and compared before the first of them exchanges anything with another."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import Store

from tokenscale.base.errors import UserError

#: what NCCL's log says of the network between nodes; the second since 2.27
NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.MULTILINE)


@dataclass(frozen=True)
class Spot:
    """One rank's node and device."""

    node: str
    device: str


def spot_of(device: torch.device, environment: Mapping[str, str] = os.environ) -> Spot:
    """This rank's. A GPU goes by its own identity, whatever number it is seen under; a CPU is there for all."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"process {os.getpid()}"
    return Spot(environment.get("SLURMD_NODENAME") or platform.node(), name)


def exchange_devices(mine: Spot, rank: int, size: int, store: Store) -> list[Spot]:
    """Every rank's spot, in their order. All ranks must ask."""
    store.set(f"spot/{rank}", "\n".join(asdict(mine).values()))
    found = store.multi_get([f"spot/{other}" for other in range(size)])
    return [Spot(*text.decode().split("\n")) for text in found]


def check(spots: list[Spot], nodes: int | None) -> None:
    """Raise UserError where two ranks share a device, or where they do not fill the nodes that were asked for evenly.

    Such a world computes the right losses at a speed that means nothing. `nodes` None: any number of nodes will do.
    """
    seen: dict[Spot, int] = {}
    for rank, spot in enumerate(spots):
        if spot in seen:
            raise UserError(
                "two ranks have the same device.",
                ranks=f"{seen[spot]} and {rank}",
                node=spot.node,
                device=spot.device,
                next="give each rank its own: srun --gpus-per-task=1, or LOCAL_RANK that counts on each node",
            )
        seen[spot] = rank
    found = list(dict.fromkeys(spot.node for spot in spots))
    if nodes is None:
        return
    if len(found) != nodes:
        raise UserError(
            "the ranks are not on as many nodes as they should be.",
            expected=f"{nodes} nodes",
            found=f"{len(found)}: {', '.join(found)}",
            next="start it with `python -m tokenscale launch`, which spells every option of srun out",
        )
    each = len(spots) // nodes
    if any(spot.node != found[rank // each] for rank, spot in enumerate(spots)):
        raise UserError(
            "the ranks do not fill their nodes one after the other.",
            found=", ".join(f"{rank} on {spot.node}" for rank, spot in enumerate(spots)),
            expected=f"{each} neighbours on each of {nodes} nodes",
            next="srun --distribution=block, and as many tasks on every node",
        )


def reported_network(environment: Mapping[str, str] = os.environ) -> str | None:
    """What this process' NCCL says it talks over between nodes; None where its log is not kept or says nothing."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:
        return None
    path = Path(pattern.replace("%p", str(os.getpid())))
    texts = [file.read_text(errors="replace") for file in path.parent.glob(path.name.replace("%h", "*"))]
    found = NETWORK.findall("\n".join(texts))
    return found[-1].strip() if found else None


def check_network(expected: str, found: str | None) -> None:
    """Raise UserError where NCCL talks over something else: over TCP it is right, and twenty times slower."""
    if found is None or expected.lower() not in found.lower():
        raise UserError(
            "NCCL does not talk over the network that it should.",
            expected=expected,
            found=found or "nothing said in NCCL_DEBUG_FILE",
            next="look for its plugin in the container (aws-ofi-nccl), or change `network` in the machine's file",
        )
