"""Start the ranks of a run on this machine, and terminate them together."""

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from tokenscale.base.errors import UserError
from tokenscale.base.processes import reaches_itself
from tokenscale.runs.records.provenance import count_cores
from tokenscale.settings.layout import RENDEZVOUS_SECRET

#: why a rank ends by SIGKILL, and the next step; `failure_hints` uses both
KILLED = "a process was killed without a message, most often because main memory was full"
NEXT_IF_KILLED = "`dmesg` on that node, if you may; a larger mem_mb, or fewer runs on one node"

#: signals that end a launcher: from a terminal, a scheduler, a closed session, an approaching time
#: limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: seconds for ranks to write a resume state after a signal, and between two looks at them
GRACE_S = 30.0
POLL_S = 0.05
#: torch uses the larger of the first two, Snakemake sets the first three to the job's threads, and
#: tokenizers use the last one
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: exit code of a rank whose port is taken: nothing has started, so another port can be tried
PORT_TAKEN = 76
PORTS_TRIED = 3
#: open files of a rank, and of its connections to each rank: 31 were needed with 2 ranks, 33 to 36
#: with 4; a margin for stores of many files
FILES_PER_RANK = 64
FILES_PER_PEER = 8
#: variables that define a process's rank and world
WORLD_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
}
WORLD_VARIABLES.add(RENDEZVOUS_SECRET)


def run_ranks(
    argv: list[str],
    world_size: int,
    *,
    device: str = "auto",
    variables: dict[str, str] | None = None,
    keep: tuple[int, ...] = (),
) -> int:
    """Run `argv` once per rank, with torchrun's environment variables and `variables`.

    Returns 0, or the exit code of the first failed rank. When a rank fails, its number and exit
    code are printed and the others are terminated: their errors are only consequences. Signals to
    this process are forwarded to the ranks, which have `GRACE_S` seconds to write a resume state.
    """
    base = rank_environment(threads_per_rank(world_size), device=device) | (variables or {})
    if world_size == 1:
        return run_processes([(argv, base)], keep=keep)
    base |= local_rendezvous(base, world_size) | new_secret()
    base |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    for _ in range(PORTS_TRIED):  # between now and the first rank's listening, imports take seconds
        base["MASTER_PORT"] = str(free_port())
        commands = [
            (argv, base | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world_size)
        ]
        code = run_processes(commands, keep=keep)
        if code != PORT_TAKEN:
            break
    return code


def local_rendezvous(base: dict[str, str], world_size: int) -> dict[str, str]:
    """Return rendezvous variables for one machine, whose ranks meet on the loopback interface.
    Raises UserError where it is down, for which gloo would wait, and where a rank may open too few
    files for its connections.
    """
    if not reaches_itself():
        raise UserError(
            "the ranks of a run cannot reach each other: the loopback interface is down.",
            address="127.0.0.1",
            next="ip link set lo up, or run one rank",
        )
    _check_open_files(world_size)
    interface = (
        {"GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo")}
        if sys.platform == "linux"
        else {}
    )
    return {"MASTER_ADDR": "127.0.0.1", **interface}


def _check_open_files(world_size: int) -> None:
    """Raise UserError if a rank may not open as many files as it and its connections need."""
    needed = FILES_PER_RANK + FILES_PER_PEER * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    following = f"ulimit -n {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        following = "raise that limit (`ulimit -Hn` prints how far you may)"
    raise UserError(
        "the ranks of a run may open too few files.",
        found=f"ulimit -n is {soft}",
        expected=f"at least {needed} for {world_size} ranks",
        next=f"{following}, or run one rank",
    )


def new_secret() -> dict[str, str]:
    """Return a secret for the keys of a run's rendezvous. Only processes of the same user can read
    it.
    """
    return {RENDEZVOUS_SECRET: secrets.token_hex(16)}


def rank_environment(threads: int, device: str = "auto") -> dict[str, str]:
    """Return this process's environment for ranks with `threads` threads each. `device` is the
    run's.
    """
    # drop variables of an outer launcher: these ranks are a separate world
    base = {name: value for name, value in os.environ.items() if name not in WORLD_VARIABLES}
    base |= dict.fromkeys(THREADS, str(threads))
    # glibc returns large freed blocks to the system and faults them in again each step: 0.16 s
    # instead of 0.09 s per step of the demo's model here. Ignored by other C libraries.
    base = {
        "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    } | base
    # CUDA memory in segments that grow: batches of other shapes leave no gaps that are too small.
    # The second name is the older one
    if device != "cpu" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & base.keys():
        base["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    base["PYTHONUNBUFFERED"] = "1"
    return base


def run_processes(
    commands: list[tuple[list[str], dict[str, str]]],
    *,
    stderr: IO[str] | None = None,
    end_signal: signal.Signals = signal.SIGTERM,
    keep: tuple[int, ...] = (),
) -> int:
    """Start (argv, environment) commands, wait for all and terminate them together. Returns as
    `run_ranks` does.

    `end_signal` asks them to end: SIGTERM for ranks and torchrun; srun kills its tasks at SIGTERM
    but forwards SIGUSR1. They inherit the descriptors `keep`, so a run stays locked as long as one
    of its ranks lives.
    """
    # A launcher that is terminated (scancel, a killed Snakemake) ends its ranks first: they would
    # go on and write. The handler only notes the signal; raising inside `Popen.poll` can leave its
    # lock held for ever.
    received: list[int] = []
    # nohup
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in handled
    }
    processes: list[subprocess.Popen] = []
    try:
        for argv, variables in commands:
            try:
                processes.append(
                    subprocess.Popen(argv, env=variables, stderr=stderr, pass_fds=keep)
                )
            except OSError as error:
                facts = {"program": argv[0], "reason": error.strerror}
                following = "install the program, or correct its path and its permissions"
                raise UserError("a process cannot be started.", **facts, next=following) from None
        return _wait_for_processes(processes, received, end_signal=end_signal)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def threads_per_rank(world_size: int) -> int:
    """Return an even share of the job's threads (OMP_NUM_THREADS as Snakemake sets it, else the
    cores).
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = count_cores()  # more threads than cores make ranks wait for each other
    job = min(int(threads), cores) if threads.isdigit() and int(threads) else cores
    return max(1, job // world_size)


def _wait_for_processes(
    processes: list[subprocess.Popen], received: list[int], end_signal: signal.Signals
) -> int:
    """Return the exit code of the processes. A signal is forwarded once; a second SIGINT ends the
    wait.
    """
    while not received:
        codes = [r.poll() for r in processes]
        failed = [(number, code) for number, code in enumerate(codes) if code]
        if failed:
            number, code = failed[0]
            # of a single rank that could say itself why it failed, nothing
            if len(processes) > 1 or code == -signal.SIGKILL:
                print(_describe_failure(number, code, others=codes.count(None)), file=sys.stderr)
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)
    _end_processes(processes, received, end_signal=end_signal)
    return 128 + received[0]


def _end_processes(
    processes: list[subprocess.Popen], received: list[int], end_signal: signal.Signals
) -> None:
    """Send a signal to those that run, and wait for their end, a while or until a second SIGINT."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(end_signal)
    if received[0] == signal.SIGINT:
        print(
            "\ntokenscale: stopping after this step, to save its state; Ctrl-C again ends at once.",
            file=sys.stderr,
        )
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        # USR1: the time limit ends it
        late = received[0] != signal.SIGUSR1 and time.monotonic() - began > GRACE_S
        if late or received.count(signal.SIGINT) > 1:
            break
        time.sleep(POLL_S)


def _describe_failure(rank: int, code: int, others: int) -> str:
    """Return which rank failed first, how, and how many others are ended with it."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"tokenscale: rank {rank} failed first ({how}); ending {others} other rank(s)."
    if code == -signal.SIGKILL:  # it could not say why itself
        message += f"\n  cause   {KILLED}\n  next    {NEXT_IF_KILLED}"
    return message


def free_port() -> int:
    """Return a port of the loopback interface that is free at the moment."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            following = "end other programs that hold ports, then start the run again"
            raise UserError(
                "no free port on the loopback interface.", reason=error, next=following
            ) from None
        return probe.getsockname()[1]
