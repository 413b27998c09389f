"""Start the ranks of one run on this machine, and end them together."""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from tokenscale.base.errors import UserError
from tokenscale.runs.records.hardware import cores

#: what ends a launcher: a terminal, a scheduler, a closed session, a time limit that comes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: seconds that ranks get to write a state to go on from, once a launcher has been told to end
GRACE_S = 30.0
#: torch takes the larger of the first two, and Snakemake sets the first three to the job's threads; tokenizers that
#: encode while training count by the last
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: the exit code of a rank that was to listen where another process does: no rank has begun, and another port will do
PORT_TAKEN = 76
PORTS_TRIED = 3
#: what says to a process which rank of which world it is
WORLD = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def run_ranks(
    argv: list[str],
    world_size: int,
    *,
    variables: dict[str, str] | None = None,
    poll_s: float = 0.05,
    grace_s: float = GRACE_S,
    keep: tuple[int, ...] = (),
) -> int:
    """Run `argv` once a rank, with the environment torchrun would set, and `variables` over it.

    Returns 0, or the code of the first that failed. When a rank fails, the others are ended at once and the first
    one's number and exit code are printed: what the others say afterwards is only its echo. When this process is told
    to end, ranks are told so, and have `grace_s` seconds for a state to go on from.
    """
    base = environment(threads_per_rank(world_size)) | (variables or {})
    if world_size == 1:
        return run([(argv, base)], poll_s=poll_s, grace_s=grace_s, keep=keep)
    base |= one_machine(base) | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    for _ in range(PORTS_TRIED):  # between now and the first rank's listening, imports take seconds
        base["MASTER_PORT"] = str(free_port())
        commands = [(argv, base | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world_size)]
        code = run(commands, poll_s=poll_s, grace_s=grace_s, keep=keep)
        if code != PORT_TAKEN:
            break
    return code


def one_machine(base: dict[str, str]) -> dict[str, str]:
    """Where ranks of one machine meet: the loopback interface always works, whatever the host name resolves to."""
    interface = {"GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo")} if sys.platform == "linux" else {}
    return {"MASTER_ADDR": "127.0.0.1", **interface}


def environment(threads: int) -> dict[str, str]:
    """This process' variables as ranks get them, with so many threads for each."""
    # what a launcher around this one may have left: these ranks are a world of their own
    base = {name: value for name, value in os.environ.items() if name not in WORLD}
    base |= dict.fromkeys(THREADS, str(threads))
    # glibc hands large freed blocks back at once and faults them in again each step: 0.16 against 0.09 s a step of the
    # demo's model here. Ignored by other C libraries.
    base = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)} | base
    base["PYTHONUNBUFFERED"] = "1"
    return base


def run(
    commands: list[tuple[list[str], dict[str, str]]],
    *,
    poll_s: float = 0.05,
    grace_s: float = GRACE_S,
    stderr: IO[str] | None = None,
    word: signal.Signals = signal.SIGTERM,
    keep: tuple[int, ...] = (),
) -> int:
    """Start these (argv, environment) and wait for all of them; they end together. Returns as `run_ranks` does.

    `word` is what tells them to end: ranks and torchrun understand SIGTERM; srun ends its tasks by force at that, and
    passes SIGUSR1 on. They keep the files `keep` open: the lock of a run is held as long as one of its ranks lives.
    """
    # A launcher that is told to end (scancel, a killed Snakemake) ends its ranks first: they would go on and write. The
    # handler only notes the signal; raising inside `Popen.poll` can leave its lock held for ever.
    received: list[int] = []
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    processes: list[subprocess.Popen] = []
    try:
        for argv, variables in commands:
            try:
                processes.append(subprocess.Popen(argv, env=variables, stderr=stderr, pass_fds=keep))
            except OSError as error:
                raise UserError(
                    "a process cannot be started.",
                    program=argv[0],
                    reason=error.strerror,
                    next="install the program, or correct its path and its permissions",
                ) from None
        return _wait(processes, received, word, poll_s, grace_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def threads_per_rank(world_size: int) -> int:
    """An even share of the job's threads: OMP_NUM_THREADS as Snakemake sets it for the whole job, else the cores.

    More threads than cores make two ranks wait for each other: 0.62 against 0.13 s a step of the demo here.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "")
    job = min(int(stated), cores()) if stated.isdigit() and int(stated) else cores()
    return max(1, job // world_size)


def _wait(
    processes: list[subprocess.Popen], received: list[int], word: signal.Signals, poll_s: float, grace_s: float
) -> int:
    while not received:
        codes = [r.poll() for r in processes]
        failed = [(number, code) for number, code in enumerate(codes) if code]
        if failed:
            number, code = failed[0]
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            others = sum(c is None for c in codes)
            if len(processes) > 1:
                print(
                    f"tokenscale: rank {number} failed first ({how}); ending {others} other rank(s).", file=sys.stderr
                )
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(poll_s)
    _signal(processes, received, word, poll_s, grace_s)
    return 128 + received[0]


def _signal(
    processes: list[subprocess.Popen], received: list[int], word: signal.Signals, poll_s: float, grace_s: float
) -> None:
    """Pass the word on, once, and wait: for as long as a time limit leaves, or the grace; a second SIGINT cuts it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(word)
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        late = received[0] != signal.SIGUSR1 and time.monotonic() - began > grace_s
        if late or received.count(signal.SIGINT) > 1:
            return
        time.sleep(poll_s)


def free_port() -> int:
    """A port of the loopback interface that nobody has at this moment."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise UserError(
                "no free port on the loopback interface.",
                reason=error,
                next="end other programs that hold ports, then start the run again",
            ) from None
        return probe.getsockname()[1]
