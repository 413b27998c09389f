"""Run a function on several gloo ranks: torch is imported once, then forked."""

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
# DDP and every optimizer import torch._dynamo when first used: seconds for each rank, unless it is there already
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "numpy"])


def run_ranks(function, world_size: int, *arguments, timeout_s: float = 120):
    """`function(world, *arguments)` on every rank, one thread each. Returns their results, in rank order.

    The function lives in an importable module; results are picklable. A rank's failure fails the caller.
    """
    queue = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank, args=(function, r, world_size, Path(folder) / "store", queue, arguments))
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            results = dict(queue.get(timeout=timeout_s) for _ in ranks)
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
    failures = {r: value for r, (ok, value) in results.items() if not ok}
    assert not failures, "\n".join(f"rank {r}:\n{text}" for r, text in sorted(failures.items()))
    return [results[r][1] for r in range(world_size)]


def _rank(function, rank, world_size, store, queue, arguments):
    import torch
    import torch.distributed as dist

    from tokenscale.parallel.world import World

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(World(rank, world_size, rank, torch.device("cpu")), *arguments)
        queue.put((rank, (True, result)))
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        queue.put((rank, (False, traceback.format_exc())))
