"""No room, no right, a read-only file system: every job says so in one message, and the same call then ends well."""

import json
import os
import subprocess
import sys

import pytest

from tokenscale.cli.main import translate_error

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


def in_namespace(*arguments) -> list[dict]:
    """What `without_room` prints for these arguments."""
    if not may_mount():
        pytest.skip("this user may not mount a tmpfs of its own")
    command = [*NAMESPACE, sys.executable, "-m", "tests.faults.without_room", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("fault, stage, share", [("bytes", "tokens", 0.3), ("inodes", "tables", 0.5)])
def test_a_whole_call_that_runs_out_of_room_says_so_and_the_next_completes(stages, tmp_path, fault, stage, share):
    first, second, last = in_namespace(stages.folder, fault, tmp_path, stage, share)
    said = "the disk is full." if fault == "bytes" else "the file system can hold no more files."
    assert first["code"] != 0 and f"tokenscale: {said}" in first["said"] and "Traceback" not in first["said"], first
    assert second["code"] == 0, second
    assert last == {"lost": []}


@pytest.mark.parametrize("fault", SAID)
def test_every_job_says_what_it_lacks_and_then_makes_what_it_would_have_made(stages, tmp_path, fault):
    *jobs, last = in_namespace(stages.folder, fault, tmp_path)
    assert len(jobs) >= 14 and {"corpus", "pretokenize", "launch", "ingest", "report"} <= {j["job"][0] for j in jobs}
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


@pytest.mark.parametrize(
    "error", [OSError("10247 requested and 4080 written"), OSError(28, "x"), RuntimeError("No space left on device")]
)
def test_a_disk_that_took_a_part_is_full_whoever_wrote(error):
    said = translate_error(error).render()
    assert said.startswith("tokenscale: the disk is full.") and os.getcwd() in said
    assert translate_error(OSError("10247 requested and 10247 read")) is None


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
