"""A container is killed, and the next one of the same folder goes on: other host name, other or
same boot.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_disk import NAMESPACE, may_mount

WRITE = """
import sys
from pathlib import Path
from tokenscale.base.files import atomic, lock_folder
from tokenscale.runs.launch.lock import enter_workflow
folder = Path(sys.argv[1])
enter_workflow(["all"], folder / ".snakemake")
with lock_folder(folder / "run", "run x"), atomic(folder / "run/done.json") as path:
    path.write_text(sys.argv[2])
    print("in", flush=True)
    sys.stdin.readline()
"""
BOOT = "/proc/sys/kernel/random/boot_id"
ENTER = (
    f'hostname "$1" && if [ -n "$2" ]; then mount --bind "$2" {BOOT}; fi && shift 2 && exec "$@"'
)


def container(name: str, boot: str, folder: Path, text: str) -> subprocess.Popen:
    """A process that writes below the folder and waits: in a host of this name, of another boot if
    that is named.
    """
    argv = [
        *NAMESPACE,
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        ENTER,
        "sh",
        name,
        boot,
    ]
    argv += [sys.executable, "-c", WRITE, str(folder), text]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert (line := process.stdout.readline()) == "in\n", line + process.stdout.read()
    return process


@pytest.mark.parametrize("other_boot", [False, True])
def test_locks_are_free_and_temporary_files_are_removed(tmp_path, other_boot):
    if not may_mount():
        pytest.skip("this user may not mount")
    (tmp_path / "boot").write_text("00000000-1111-2222-3333-444444444444\n")
    folder = tmp_path / "project"
    (folder / "run").mkdir(parents=True)
    killed = container("old", "", folder, "half")
    owners = [folder / ".snakemake/tokenscale.owners", folder / "run/.lock"]
    assert all("process 1 on old" in path.read_text() for path in owners)
    killed.kill()
    # until it is gone: the end of its input would let it write the whole
    killed.stdout.read()
    killed.communicate()
    following = container(
        "new", str(tmp_path / "boot") if other_boot else "", folder, json.dumps("whole")
    )
    assert all("process 1 on new" in path.read_text() for path in owners)
    assert all(("boot 00000000" in path.read_text()) == other_boot for path in owners)
    following.communicate("\n", timeout=30)
    assert following.returncode == 0
    left = {path.name for path in (folder / "run").iterdir()} - {".lock", "done.json"}
    assert len(left) == 1, "for a day: processes of another container are not seen from here"
    assert json.loads((folder / "run/done.json").read_text()) == "whole"
    assert [path.name for path in (folder / ".snakemake").iterdir()] == ["tokenscale.owners"]
