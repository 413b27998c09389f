"""No room, no right, a read-only file system: every job says so in one message, and the same call then ends well."""

import json
import subprocess
import sys

import pytest

NAMESPACE = ["unshare", "--mount", "--propagation", "private"]
#: fault → what every job says
SAID = {
    "full": "tokenscale: the disk is full.",
    "readonly": "tokenscale: the file system is read-only.",
    "denied": "tokenscale: permission denied for this file or folder.",
}


def may_mount() -> bool:
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


@pytest.mark.parametrize("fault", SAID)
def test_every_job_says_what_it_lacks_and_then_makes_what_it_would_have_made(stages, tmp_path, fault):
    if not may_mount():
        pytest.skip("this user may not mount a tmpfs of its own")
    command = [*NAMESPACE, sys.executable, "-m", "tests.faults.without_room", stages.folder, fault, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *jobs, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(jobs) >= 14 and {job["job"][0] for job in jobs} >= {
        "corpus",
        "pretokenize",
        "launch",
        "ingest",
        "report",
    }
    for job in jobs:
        assert job["code"] == 2 and SAID[fault] in job["said"], job
        assert "Traceback" not in job["said"] and "  next  " in job["said"]
        assert not job["gone"] and not job["left"], "nothing is lost, nothing half-written stays"
        assert job["again"] == 0, job["then"]
    # each training but the first was copied, and lists of code are written by Snakemake, which is not here
    other = ("runs/", "steps of", "table", "code/")
    compared = {name: value for name, value in stages.expected.items() if not name.startswith(other)}
    assert len(compared) > 60 and {name: last["lies"].get(name) for name in compared} == compared


def test_a_file_system_without_room_for_another_file_is_not_called_full(tmp_path):
    if not may_mount():
        pytest.skip("this user may not mount a tmpfs of its own")
    code = f"""
from pathlib import Path
from tokenscale.base.files import write_text
from tokenscale.cli.main import exit_code
def job():
    for number in range(30):
        write_text(Path({str(tmp_path)!r}, str(number)), "a text")
raise SystemExit(exit_code(job, "help"))
"""
    mount = f'mount -t tmpfs -o size=1m,nr_inodes=12 tmpfs {tmp_path} && exec "$@"'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", mount, "sh", sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "the file system can hold no more files." in done.stderr, done.stderr
    assert "df -i" in done.stderr and str(tmp_path) in done.stderr


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_have_the_rights_of_all_other_files(tmp_path, umask, mode):
    code = f"""
import os, torch
from pathlib import Path
os.umask({umask})
from tokenscale.train.checkpoint import Piece, State, write_rank
write_rank(Path({str(tmp_path)!r}, "state"), 0, State({{"model.a": Piece.of(torch.zeros(2))}}))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    files = [path for path in (tmp_path / "state.partial").iterdir()]
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {mode}
