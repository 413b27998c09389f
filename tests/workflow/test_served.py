"""A job that is a fork ends with whoever asked for it, however early that one is killed."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from tests import served

SLEEP = "import time\nwhile True:\n    time.sleep(0.05)\n"


@pytest.mark.parametrize("heard", [False, True], ids=["before the answer", "behind it"])
def test_a_job_ends_with_its_caller_however_early(tmp_path, heard):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "sleeping.py").write_text(SLEEP)
    environment = {"PATH": os.environ["PATH"], "SERVED_JOBS": str(tmp_path / "jobs")}
    asked = json.dumps([["sleeping"], str(tmp_path), environment]).encode()
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as caller, open(os.devnull, "r+b") as nothing:
            caller.connect(str(Path(served.python()).parents[1] / "socket"))
            socket.send_fds(caller, [len(asked).to_bytes(8, "big")], [nothing.fileno()] * 3)
            caller.sendall(asked)
            if heard:
                caller.recv(4)
    end = time.monotonic() + 20
    while time.monotonic() < end and (left := begun(tmp_path / "jobs")) != ([], 10):
        time.sleep(0.05)
    assert left == ([], 10)


def test_who_is_killed_while_asking_has_asked_nothing(tmp_path):
    """And what would have answered ends, too."""
    with socket.socket(socket.AF_UNIX) as caller, open(os.devnull, "r+b") as nothing:
        caller.connect(str(Path(served.python()).parents[1] / "socket"))
        socket.send_fds(caller, [(1000).to_bytes(8, "big")], [nothing.fileno()] * 3)
        caller.sendall(b"[[")
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(20)
        assert caller.recv(1) == b""


def begun(jobs: Path) -> tuple[list[str], int]:
    """Jobs that have not ended, and how many have begun."""
    every = [path.name for path in jobs.iterdir() if path.name.isdigit()]
    return [job for job in every if not (jobs / f"{job}.ended").exists()], len(every)
