"""Nothing is left of the cluster of these tests. What it has: test_trainings.py."""

import subprocess
import sys
import time
from pathlib import Path

from tests.slurm.cluster import free

ROOT = Path(__file__).parents[2]
#: a job that only SIGKILL ends
STUBBORN = "trap '' TERM; while :; do sleep 1; done"


def until(condition, seconds: float = 300) -> bool:
    """Whether it comes to hold."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return holds


def nothing_is_left(cluster) -> bool:
    return (
        not cluster.processes()
        and len(cluster.ports) == 6
        and all(free(port) for port in cluster.ports)
    )


def test_after_the_end_nothing_is_left(another):
    with another:
        another.run("sbatch", "--output=/dev/null", f"--wrap={STUBBORN}")
        assert until(lambda: "sleep 1" in another.processes().values()), another.logs()
        outside = subprocess.Popen(["sleep", "1000"], env=another.environment)
        assert not nothing_is_left(another) and not any(free(port) for port in another.ports)
    assert nothing_is_left(another)
    # on a busy machine a daemon may not know SIGTERM yet
    assert [daemon.returncode in (0, -15) for daemon in another.daemons.values()] == 7 * [True]
    assert outside.wait(timeout=60) == -9


def test_nothing_is_left_when_its_owner_is_killed(another):
    code = "import sys, time; from pathlib import Path; from tests.slurm.cluster import Cluster\n"
    code += (
        "with Cluster(Path(sys.argv[1])) as cluster: print(*cluster.ports, flush=True); "
        "time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(another.root)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        another.ports = [int(port) for port in owner.stdout.readline().split()]
        assert another.processes()
        owner.kill()
    assert until(lambda: nothing_is_left(another)), another.processes()
