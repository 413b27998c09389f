"""The processes of one run: rank, device, process group, and their end."""

import atexit
import datetime
import errno
import gc
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store

from tokenscale.base.errors import UserError
from tokenscale.settings.layout import RENDEZVOUS_SECRET
from tokenscale.train.watchdog import FIRST_TIMES, LAST_S

#: seconds that a collective waits longer than the watchdog, which says where each rank stands
AFTER_WATCHDOG_S = 10 * LAST_S

#: the line of NCCL's log that names the network between nodes; the second form since 2.27
NETWORK = re.compile(
    r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.MULTILINE
)


@dataclass(frozen=True)
class NodeDevice:
    """One rank's node and device."""

    node: str
    device: str


def node_device(device: torch.device, environment: Mapping[str, str] = os.environ) -> NodeDevice:
    """Return this rank's node and device. A GPU is named by its UUID; ranks on a CPU never share a
    device.
    """
    name = (
        str(torch.cuda.get_device_properties(device).uuid)
        if device.type == "cuda"
        else f"process {os.getpid()}"
    )
    return NodeDevice(environment.get("SLURMD_NODENAME") or platform.node(), device=name)


def exchange_devices(mine: NodeDevice, rank: int, size: int, store: Store) -> list[NodeDevice]:
    """Return the devices of all ranks, in their order. A collective."""
    store.set(f"device/{rank}", "\n".join(asdict(mine).values()))
    found = store.multi_get([f"device/{other}" for other in range(size)])
    return [NodeDevice(*text.decode().split("\n")) for text in found]


def check(devices_of_ranks: list[NodeDevice], nodes: int | None) -> None:
    """Raise UserError where two ranks share a device, or where ranks do not fill the requested
    nodes evenly.

    Such a run computes the right losses at a meaningless speed. `nodes` None: any number of nodes
    is accepted.
    """
    seen: dict[NodeDevice, int] = {}
    for rank, node_device in enumerate(devices_of_ranks):
        if node_device in seen:
            raise UserError(
                "two ranks have the same device.",
                ranks=f"{seen[node_device]} and {rank}",
                node=node_device.node,
                device=node_device.device,
                next=(
                    "give each rank its own: srun --gpus-per-task=1, or LOCAL_RANK that counts "
                    "on each node"
                ),
            )
        seen[node_device] = rank
    found = list(dict.fromkeys(node_device.node for node_device in devices_of_ranks))
    if nodes is None:
        return
    if len(found) != nodes:
        what = "the ranks are not on as many nodes as they should be."
        next_step = "start it with `tokenscale launch`, which spells every option of srun out"
        raise UserError(
            what,
            expected=f"{nodes} nodes",
            found=f"{len(found)}: {', '.join(found)}",
            next=next_step,
        )
    each = len(devices_of_ranks) // nodes
    if any(
        node_device.node != found[rank // each] for rank, node_device in enumerate(devices_of_ranks)
    ):
        raise UserError(
            "the ranks do not fill their nodes one after the other.",
            found=", ".join(
                f"{rank} on {node_device.node}" for rank, node_device in enumerate(devices_of_ranks)
            ),
            expected=f"{each} neighbours on each of {nodes} nodes",
            next="srun --distribution=block, and as many tasks on every node",
        )


def reported_network(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the network between nodes that NCCL's log of this process names; None without a log or
    such a line.
    """
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:
        return None
    path = Path(pattern.replace("%p", str(os.getpid())))
    texts = [
        file.read_text(errors="replace") for file in path.parent.glob(path.name.replace("%h", "*"))
    ]
    found = NETWORK.findall("\n".join(texts))
    return found[-1].strip() if found else None


def check_network(expected: str, found: str | None) -> None:
    """Raise UserError where NCCL uses another network than the expected one: TCP works, twenty
    times slower.
    """
    if found is None or expected.lower() not in found.lower():
        what = "NCCL does not use the expected network between nodes."
        next_step = (
            "look for its plugin in the container (aws-ofi-nccl), or change `network` in the "
            "machine's file"
        )
        raise UserError(
            what,
            expected=expected,
            found=found or "no line about it in NCCL_DEBUG_FILE",
            next=next_step,
        )


class PortTaken(UserError):
    """Another process listens at the port where the ranks of this run rendezvous."""


@dataclass(frozen=True)
class World:
    """One rank's view of the run's processes. `size` 1 needs no process group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    nodes: tuple[str, ...] = ()  # their names, in the order of ranks
    network: str | None = None  # the network between nodes, as NCCL names it
    links: dict[str, float] | None = None  # measured GB/s by kind of link (`preflight`)
    timeout: datetime.timedelta | None = None  # of its collectives; None: the library's

    def sum(self, *values: float, integer: bool = False) -> list:
        """Sum each value over all ranks (fp64 or int64). A collective: every rank must call it."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(
            values, dtype=torch.int64 if integer else torch.float64, device=self.device
        )
        dist.all_reduce(total)
        return total.tolist()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Tear down the process group in the order that does not abort: garbage, barrier,
        destroy.
        """
        if self.size > 1 and dist.is_initialized():
            gc.collect()
            dist.barrier()
            dist.destroy_process_group()


def join(
    expected_size: int | None,
    device: str = "auto",
    *,
    nodes: int | None = None,
    network: str | None = None,
    hang_s: float = 0,
) -> World:
    """Join the run's process group, from the environment that torchrun or our own launcher sets.

    `expected_size` None: any number. `device` is the run's: "auto" takes one GPU per rank where
    there are GPUs, "cpu" never takes one. Collectives wait longer than the watchdog of `hang_s`
    seconds (0: none), which says where ranks stand. Raises UserError where the processes are not those of the
    run: N single-rank runs in place of one N-rank run would give plausible, wrong figures, and so
    would two ranks on one GPU, another number of `nodes`, or another `network` between them. Raises
    PortTaken where another process has the port.
    """
    size = _read_variable("WORLD_SIZE", default=1, allowed=range(1, 2**31))
    rank, local_rank = (
        _read_variable(name, default=0, allowed=range(size)) for name in ("RANK", "LOCAL_RANK")
    )
    if expected_size not in (None, size):
        raise UserError(
            "the number of processes is not the run's world size.",
            run=f"wants world size {expected_size}",
            found=f"WORLD_SIZE={size} (rank {rank})",
            next="start it with `tokenscale launch`, or with as many ranks as its layout has",
        )
    cuda = device == "auto" and torch.cuda.is_available()
    # srun with one GPU a task shows each rank a single device, which is then number 0
    devices = torch.cuda.device_count()
    if cuda and _read_variable("LOCAL_WORLD_SIZE", default=1, allowed=range(1, size + 1)) > devices:
        raise UserError(
            "there are fewer GPUs than ranks on this machine.",
            found=f"{devices} GPU(s)",
            run=f"starts {os.environ['LOCAL_WORLD_SIZE']} ranks here",
            next="use a layout with fewer ranks, a machine with more GPUs, or `device: cpu`",
        )
    mine = torch.device("cuda", local_rank % devices) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(mine)
    devices_of_ranks = [node_device(mine)]
    if size > 1:
        _choose_interface(size)
        store = _open_store(rank, size, nodes=nodes)
        devices_of_ranks = exchange_devices(
            devices_of_ranks[0],
            rank,
            size=size,
            store=store,
        )
    check(devices_of_ranks, nodes)
    found = None
    patience = hang_s * FIRST_TIMES + AFTER_WATCHDOG_S
    timeout = datetime.timedelta(seconds=patience) if hang_s else None
    if size > 1:
        group = dist.PrefixStore("group", store)
        backend, bound = ("nccl", mine) if cuda else ("gloo", None)
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=group,
            rank=rank,
            world_size=size,
            device_id=bound,
        )
        found = reported_network() if cuda else None
        if network is not None and cuda and (nodes or 1) > 1:
            check_network(network, found)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=mine,
        nodes=tuple(dict.fromkeys(node_device.node for node_device in devices_of_ranks)),
        network=found,
        timeout=timeout,
    )


def _read_variable(name: str, default: int, allowed: range) -> int:
    """Return a number that a launcher put into the environment. Raises UserError where it is not
    one of those allowed.

    A variable may be left over from another job.
    """
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) not in allowed:
        expected = f"a whole number from {allowed.start} to {allowed.stop - 1}"
        what = "a variable that launchers of ranks set has a value that it cannot have."
        raise UserError(what, found=f"{name}={text}", expected=expected, next=NO_LAUNCHER)
    return int(text)


def _choose_interface(size: int) -> None:
    """Let gloo and NCCL listen on the loopback interface alone where all ranks are on this
    machine.
    """
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _open_store(rank: int, size: int, nodes: int | None) -> dist.Store:
    """Return the store through which the ranks find each other.

    Torchrun listens itself, on every interface, and its store is used, unless its own rendezvous is
    a file (docs/clusters.md). Else rank 0 listens: on the loopback interface where all ranks are
    on this machine, or on that of MASTER_ADDR. Keys begin with the run's secret where the launcher
    has set one, so that processes of another job that use this port by mistake neither read nor
    overwrite them. Raises PortTaken.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://"))[0]
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        found = f"RANK={rank}, WORLD_SIZE={size}, without {' and '.join(lacking)}"
        raise UserError(
            "the variables of a launcher are incomplete.", found=found, next=NO_LAUNCHER
        )
    address = "127.0.0.1" if here else os.environ["MASTER_ADDR"]
    port = _read_variable("MASTER_PORT", default=0, allowed=range(1, 2**16))
    listener = listen(address, port, nodes=nodes) if rank == 0 else None
    # our launcher's ranks may start late
    if RENDEZVOUS_SECRET in os.environ or "TOKENSCALE_ROOT" in os.environ:
        store: dist.Store = dist.TCPStore(address, port, size, rank == 0, master_listen_fd=listener)
    else:
        store = _meet(
            address,
            port,
            rank=rank,
            size=size,
            listener=listener,
        )
    return dist.PrefixStore(os.environ.get(RENDEZVOUS_SECRET, ""), store)


def _meet(address: str, port: int, rank: int, size: int, listener: int | None) -> dist.Store:
    """Return the store of ranks that an unknown launcher started. Raises UserError if they do not
    meet in `MEET_S`.

    The variables may be left over from another job. A plain socket waits for rank 0, because
    PyTorch prints C++ frames.
    """
    end = time.monotonic() + MEET_S
    try:
        while rank != 0:
            try:
                socket.create_connection((address, port), timeout=5).close()
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
        left = datetime.timedelta(seconds=max(1.0, end - time.monotonic()))
        store = dist.TCPStore(
            address, port, size, rank == 0, timeout=left, master_listen_fd=listener
        )
        store.set_timeout(dist.constants.default_pg_timeout)
        return store
    except (OSError, RuntimeError):
        raise UserError(
            (
                f"the other ranks cannot be reached within {MEET_S:.0f} s: RANK and WORLD_SIZE may "
                "be left over."
            ),
            found=f"RANK={rank}, WORLD_SIZE={size}, MASTER_ADDR={address}, MASTER_PORT={port}",
            next=NO_LAUNCHER,
        ) from None


def listen(address: str, port: int, nodes: int | None) -> int:
    """Return the descriptor of a socket that listens on the interface of this address."""
    try:
        family, _, _, _, found = min(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
        if address != found[0] and (nodes or 1) > 1 and ip_address(found[0]).is_loopback:
            # a node whose own name is 127.0.1.1 to itself; others reach it by another address
            found = ("", port)
        return socket.create_server(found[:2], family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                "another process has the port on which the ranks of this run rendezvous.",
                port=f"{address}:{port}",
                next=(
                    "start it again; if it stays, look for a process that an earlier job left on "
                    "the first node"
                ),
            ) from None
        what = (
            "rank 0 cannot listen at this address: MASTER_ADDR is not of its machine, or left over."
        )
        raise UserError(
            what, address=f"{address}:{port}", reason=error.strerror, next=NO_LAUNCHER
        ) from None


#: seconds in which ranks of an unknown launcher must meet
MEET_S = 40.0
NO_LAUNCHER = (
    "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT; or start all ranks with torchrun"
)
#: seconds a rank waits before it reports a lost peer, so that the original failure is reported
#: first
ECHO_S = 3.0


@contextmanager
def wait_for_root_cause(world: World) -> Iterator[None]:
    """Delay the traceback of a rank that lost a peer, until the peer's own error is printed.

    When a rank dies, its peers fail in their next collective. A rank that fails does not tear down
    its process group, whose threads sometimes abort the process at the end of the interpreter,
    which hides the exit code. Such a rank therefore exits at once after its error is printed.
    """
    try:
        yield
    except Exception as error:
        if world.size > 1:
            lost = isinstance(error, RuntimeError) and (
                isinstance(error, dist.DistError) or "gloo" in str(error)
            )
            # most mistakes are found by every rank
            if lost or (isinstance(error, UserError) and world.rank > 0):
                time.sleep(ECHO_S)
            atexit.register(_end, 2 if isinstance(error, UserError) else 1)
        raise


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
