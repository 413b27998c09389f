"""How ranks end together when one of them fails."""

import sys
import time

import pytest

from tokenscale.launch.ranks import run_ranks

pytestmark = pytest.mark.distributed
RANK = """
import torch, torch.distributed as dist
from tokenscale.parallel.world import heard_last, join
world = join(3)
with heard_last(world):
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        raise ValueError("what really happened")
    dist.all_reduce(torch.ones(1))
"""


def test_the_rank_that_failed_is_heard_and_its_echoes_are_not(capfd):
    began = time.monotonic()
    assert run_ranks([sys.executable, "-c", RANK], 3) == 1
    said = capfd.readouterr().err
    assert "what really happened" in said and "rank 1 failed first (exit code 1)" in said
    assert "onnection" not in said and said.count("Traceback") == 1, said
    assert time.monotonic() - began < 60, "nobody waits for a timeout"
