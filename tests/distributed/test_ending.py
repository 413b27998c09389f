"""How ranks end together when one of them fails."""

import dataclasses
import datetime
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks
from tokenscale.runs.launch.ranks import run_ranks
from tokenscale.settings.layout import LayoutSettings
from tokenscale.train.parallel.sharding import Mesh

pytestmark = pytest.mark.distributed
RANK = """
import torch, torch.distributed as dist
from tokenscale.train.parallel.world import wait_for_root_cause, join
world = join(3, hang_s=7)
assert world.timeout.total_seconds() == 3 * 7 + 20  # behind the watchdog
with wait_for_root_cause(world):
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        raise ValueError("what really happened")
    dist.all_reduce(torch.ones(1))
"""

ABORTED = """
import atexit, os, torch
from tokenscale.base.errors import UserError
from tokenscale.cli.main import translate_errors
from tokenscale.train.parallel.world import World, wait_for_root_cause
atexit.register(os.abort)  # as threads of a process group that nobody parted from do now and then
print("a line before", end="")
with wait_for_root_cause(World(0, {size}, 0, torch.device("cpu"))), translate_errors():
    raise {error}("what really happened")
"""


@pytest.mark.parametrize(
    ("error", "size", "code"),
    [
        pytest.param("ValueError", 2, 1, marks=pytest.mark.long),
        ("UserError", 2, 2),
        ("MemoryError", 2, 2),
        ("ValueError", 1, -6),
    ],
)
def test_what_a_process_group_does_at_the_end_does_not_hide_an_error(error, size, code):
    command = [sys.executable, "-c", ABORTED.format(error=error, size=size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "what really happened" in done.stderr and done.returncode == code
    assert size == 1 or done.stdout == "a line before"


def test_the_rank_that_failed_is_heard_and_its_echoes_are_not(capfd):
    began = time.monotonic()
    assert run_ranks([sys.executable, "-c", RANK], 3) == 1
    said = capfd.readouterr().err
    assert "what really happened" in said and "rank 1 failed first (exit code 1)" in said
    assert "onnection" not in said and said.count("Traceback") == 1, said
    assert time.monotonic() - began < 60, "nobody waits for a timeout"


def wait_alone(world):
    """What rank 0 hears in groups of a mesh, whose other rank does not come."""
    world = dataclasses.replace(world, timeout=datetime.timedelta(seconds=2))
    mesh = Mesh(LayoutSettings(data=2, tensor=2), world)
    groups = [mesh.group("data"), mesh.group("tensor"), mesh.group_by(lambda place: place.data)]
    heard = []
    for group in groups:
        if world.rank == 0:
            with pytest.raises(RuntimeError) as error:
                dist.all_reduce(torch.ones(1), group=group)
            heard.append(str(error.value))
        dist.barrier()
    return heard


def test_every_group_of_a_mesh_waits_as_long_as_its_world_says():
    heard, *_ = ranks.run_ranks(wait_alone, 4)
    assert len(heard) == 3 and all("2000ms" in text for text in heard), heard
