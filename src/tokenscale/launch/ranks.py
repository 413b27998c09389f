"""Start the ranks of one run on this machine, and end them together."""

import os
import signal
import socket
import subprocess
import sys
import time

from tokenscale.errors import UserError
from tokenscale.records.hardware import cores

#: what ends a launcher: a terminal, a scheduler, a closed session
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: what says to a process which rank of which world it is
WORLD = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def run_ranks(argv: list[str], world_size: int, *, poll_s: float = 0.05, grace_s: float = 5.0) -> int:
    """Run `argv` once a rank, with the environment torchrun would set. Returns 0, or the code of the first that failed.

    When a rank fails, the others are ended within `grace_s` seconds and the first one's number and exit code are
    printed: what the others say afterwards is only its echo.
    """
    # A launcher that is told to end (scancel, a killed Snakemake) ends its ranks first: they would go on and write. The
    # handler only notes the signal; raising inside `Popen.poll` can leave its lock held for ever.
    told: list[int] = []
    before = {name: signal.signal(name, lambda number, frame: told.append(number)) for name in SIGNALS}
    # what a launcher around this one may have left: these ranks are a world of their own
    base = {name: value for name, value in os.environ.items() if name not in WORLD}
    # torch takes the larger of the first two, and Snakemake sets the first three to the job's threads; tokenizers that
    # encode while training count by the last
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        base[variable] = str(threads_per_rank(world_size))
    # glibc hands large freed blocks back at once and faults them in again each step: 0.16 against 0.09 s a step of the
    # demo's model here. Ignored by other C libraries.
    base = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)} | base
    base["PYTHONUNBUFFERED"] = "1"
    if world_size == 1:
        ranks = [subprocess.Popen(argv, env=base)]
    else:
        # One machine: the loopback interface always works, whatever the host name resolves to.
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
        if sys.platform == "linux":
            base.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks = [
            subprocess.Popen(
                argv, env=base | {"RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(world_size)}
            )
            for r in range(world_size)
        ]
    try:
        return _wait(ranks, told, poll_s, grace_s)
    finally:
        _end(ranks, grace_s)
        for name, handler in before.items():
            signal.signal(name, handler)


def threads_per_rank(world_size: int) -> int:
    """An even share of the job's threads: OMP_NUM_THREADS as Snakemake sets it for the whole job, else the cores.

    More threads than cores make two ranks wait for each other: 0.62 against 0.13 s a step of the demo here.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "")
    job = min(int(stated), cores()) if stated.isdigit() and int(stated) else cores()
    return max(1, job // world_size)


def _wait(ranks: list[subprocess.Popen], told: list[int], poll_s: float, grace_s: float) -> int:
    while True:
        if told:
            return 128 + told[0]
        codes = [r.poll() for r in ranks]
        failed = [(number, code) for number, code in enumerate(codes) if code]
        if failed:
            number, code = failed[0]
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            others = sum(c is None for c in codes)
            if len(ranks) > 1:
                print(
                    f"tokenscale: rank {number} failed first ({how}); ending {others} other rank(s).", file=sys.stderr
                )
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(poll_s)


def _end(ranks: list[subprocess.Popen], grace_s: float) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + grace_s
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise UserError("no free port on the loopback interface.", reason=error) from None
        return probe.getsockname()[1]
