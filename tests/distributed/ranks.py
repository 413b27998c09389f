"""Run a function on several gloo ranks: torch is imported once, then forked."""

import os
import tempfile
import time
import traceback
from pathlib import Path
from queue import Empty

from tests.forks import context


def run_ranks(function, world_size: int, *arguments, timeout_s: float = 300):
    """`function(world, *arguments)` on every rank, one thread each."""
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank,
                args=(function, r, world_size, Path(folder) / "store", queue, arguments),
            )
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            results = dict(_answers(queue, ranks, timeout_s))
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
    failures = {r: value for r, (ok, value) in results.items() if not ok}
    assert not failures, "\n".join(f"rank {r}:\n{text}" for r, text in sorted(failures.items()))
    return [results[r][1] for r in range(world_size)]


def _answers(queue, ranks, timeout_s):
    """(rank, what it found) of each as they end; one that ended without a word is a failure at
    once.
    """
    waited_for = set(range(len(ranks)))
    end = time.monotonic() + timeout_s
    while waited_for:
        # unless its answer is on the way
        silent = [r for r in waited_for if ranks[r].exitcode is not None]
        try:
            rank, answer = queue.get(timeout=1)
        except Empty:
            assert not silent, (
                f"rank {silent[0]} ended with exit code {ranks[silent[0]].exitcode} and said "
                "nothing"
            )
            assert time.monotonic() < end, (
                f"no answer from ranks {sorted(waited_for)} in {timeout_s} s"
            )
            continue
        waited_for.discard(rank)  # it speaks again where it fails after its answer
        yield rank, answer


def _rank(function, rank, world_size, store, queue, arguments):
    import torch
    import torch.distributed as dist

    from tokenscale.train.parallel.world import World

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
        result = function(World(rank, world_size, rank, torch.device("cpu")), *arguments)
        queue.put((rank, (True, result)))
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        queue.put((rank, (False, traceback.format_exc())))


def train_rank(world, run, inputs, directory, attempt=0):
    from tokenscale.train.loop import train

    train(run, inputs, directory, world, attempt)
