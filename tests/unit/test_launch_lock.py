"""One writer a run: processes of this machine by the file's lock, jobs of other nodes by the
queue.
"""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from tokenscale.base import files
from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json
from tokenscale.base.manifests import walk
from tokenscale.cli import main as cli
from tokenscale.runs.launch import lock

HOLD = (
    "import sys, time; from pathlib import Path; from tokenscale.runs.launch import lock\n"
    "with lock.hold_run_folder(Path(sys.argv[1]), 'run x'): print('held', flush=True); "
    "time.sleep(99)"
)


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(files, "POLL_S", 0.01)


def holder(folder, job=None):
    with pytest.MonkeyPatch.context() as patch:
        if job:
            patch.setenv("SLURM_JOB_ID", job)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True
        )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def left(tmp_path, monkeypatch):
    """A function that sets what the queue answers for job 45, whose process was killed: its lock is
    free, with its name in it.
    """
    process = holder(tmp_path, job="45")
    process.kill()
    process.wait()
    return lambda answer: monkeypatch.setattr(lock.job, "may_still_write", answer)


def test_a_held_folder_is_refused_with_its_owner(tmp_path):
    process = holder(tmp_path)
    try:
        with (
            pytest.raises(UserError, match=f"process {process.pid} on"),
            lock.hold_run_folder(tmp_path, "run x"),
        ):
            pass
    finally:
        process.kill()


def test_the_owner_names_its_job_and_an_orderly_end_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "45")
    with lock.hold_run_folder(tmp_path, "run x"):
        assert "job 45" in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_lock_that_a_dead_process_left_is_free_once_its_job_has_ended(
    tmp_path, monkeypatch, capfd, left
):
    """On another node: the file's lock may not reach there, and ranks outlive their launcher."""
    monkeypatch.setenv("SLURM_JOB_ID", "46")
    answers = iter([True, None, True, False])
    left(lambda job: next(answers))
    with lock.hold_run_folder(tmp_path, "run x", wait=True):
        pass
    assert next(answers, "all asked") == "all asked"
    assert capfd.readouterr().out.count("may still be written by job 45") == 1


@pytest.mark.parametrize(
    ("waits", "answer", "words"), [(False, True, "scancel 45"), (True, None, "does not answer")]
)
def test_a_job_in_the_queue_or_a_silent_queue_is_an_error(
    tmp_path, monkeypatch, left, waits, answer, words
):
    if waits:
        monkeypatch.setenv("SLURM_JOB_ID", "46")
        monkeypatch.setattr(files, "PATIENCE_S", 0.05)
    left(lambda job: answer)
    with pytest.raises(UserError, match=words), lock.hold_run_folder(tmp_path, "run x", wait=waits):
        pass


def test_a_machine_without_the_queue_or_the_requeued_job_takes_the_lock_again(
    tmp_path, monkeypatch, left
):
    left(lambda job: None)
    with lock.hold_run_folder(tmp_path, "run x"):
        pass
    (tmp_path / ".lock").write_text("process 4242 on nid1, job 45\n")
    monkeypatch.setenv("SLURM_JOB_ID", "45")
    left(lambda job: pytest.fail("asked for its own job"))
    with lock.hold_run_folder(tmp_path, "run x"):
        pass


def test_a_run_is_held_as_long_as_one_of_its_ranks_lives(tmp_path):
    """A launcher that is killed with 9 leaves its ranks; a second attempt beside them would write
    the same states.
    """
    code = (
        "import sys; from pathlib import Path; from tokenscale.runs.launch import lock, ranks\n"
        "with lock.hold_run_folder(Path(sys.argv[1]), 'run x') as held:\n"
        "    sleep = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "    ranks.run_ranks([sys.executable, '-c', sleep], 1, keep=(held,))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "1\n"
    rank = int(subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True).stdout)
    launcher.kill()
    launcher.wait()
    with (
        pytest.raises(UserError, match="being written by another process"),
        lock.hold_run_folder(tmp_path, "run x"),
    ):
        pass
    os.kill(rank, signal.SIGKILL)
    with lock.hold_run_folder(tmp_path, "run x", wait=True):
        pass


def test_a_store_that_another_process_makes_is_waited_for(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "tokenizers/numbers"
    process = holder(folder)
    monkeypatch.setattr(files.time, "sleep", lambda _: process.kill())
    settings = '{"name": "numbers", "kind": "numbers", "vocabulary_size": 20}'
    cli.main(["tokenizer", "--settings", settings, "--output", str(folder / "manifest.json")])
    said = capfd.readouterr().out
    assert f"the tokenizer numbers is being written by process {process.pid}" in said
    assert said.count("waiting for it") == 1
    assert (folder / "manifest.json").exists()


def test_what_a_killed_writer_left_is_removed_by_the_next_and_a_living_ones_stays(tmp_path):
    code = (
        "import sys; from tokenscale.base.files import atomic\n"
        "with atomic(sys.argv[1]) as path: path.write_text('half'); print('in', flush=True); "
        "sys.stdin.read()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed, living = (
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "table.json"], **options)
        for _ in "ab"
    )
    assert {killed.stdout.readline(), living.stdout.readline()} == {"in\n"}
    killed.kill()
    killed.wait()
    (tmp_path / ".mine.tmp").touch()  # somebody else's
    assert len(list(tmp_path.iterdir())) == 3
    files._remove_left_over.cache_clear()
    write_json(tmp_path / "table.json", {})
    assert len(list(tmp_path.iterdir())) == 3 and (tmp_path / ".mine.tmp").exists()
    living.communicate("")
    assert (tmp_path / "table.json").read_text() == "half" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("process", "stays"),
    [
        ("mine", True),
        ("1", True),  # of another user, or not: it is there
        (f"{2**22 + 1}", False),  # Linux gives no such number
        (f"{2**80}", False),
        ("zombie", False),
        ("no-number", True),
    ],
)
def test_a_temporary_file_stays_as_long_as_the_process_in_its_name(process, stays, tmp_path):
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    number = {"mine": os.getpid(), "zombie": zombie.pid}.get(process, process)
    left = tmp_path / f"{files._name_place()}{number}-x.a.json.tmp"
    left.touch()
    files._remove_left_over.__wrapped__(tmp_path)
    assert left.exists() is stays
    zombie.wait()


@pytest.mark.parametrize(("age_s", "stays"), [(0, True), (86_000, True), (87_000, False)])
def test_a_temporary_file_of_another_boot_stays_for_a_day(age_s, stays, tmp_path, monkeypatch):
    """Processes of another node are not seen from here, and its locks may not reach this one."""
    with monkeypatch.context() as on_other:
        on_other.setattr(files, "get_boot_id", lambda: "another boot")
        name = files.name_temporary()
    left = tmp_path / f"{name}x.a.json.tmp"
    left.touch()
    os.utime(left, (time.time() - age_s,) * 2)
    files._remove_left_over.cache_clear()
    write_json(tmp_path / "a.json", {})
    assert left.exists() is stays


def test_a_file_in_a_new_folder_has_usual_permissions_and_is_closed(tmp_path):
    (tmp_path / "other").touch()
    opened = len(os.listdir("/dev/fd"))
    with files.atomic(tmp_path / "new/folder/a.json") as path:
        path.write_text("{}")
    assert (tmp_path / "new/folder/a.json").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert len(os.listdir("/dev/fd")) == opened


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "x.json"
    other = tmp_path / "thesis"
    other.write_text("{}")
    make = {"link": lambda: path.symlink_to(other), "device": lambda: path.symlink_to("/dev/zero")}
    (make | {"fifo": lambda: os.mkfifo(path), "folder": path.mkdir})[kind]()
    if kind == "link":
        assert files.read_json(path) == {}  # whoever reads may have linked it
    else:
        with pytest.raises(UserError, match=r"not a regular file|not readable"):
            files.read_json(path)
    with pytest.raises(UserError, match="not a regular file"):
        files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, follow=False)
    assert other.read_text() == "{}"


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b'{"a": Infinity}',
        b"[-Infinity]",
        b"[1e999]",
        b'{"a": -1e400}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b"\xff",
        b"{",
        b"[" * 100_000,
        b"",
    ],
)
def test_json_that_we_do_not_write_is_refused_with_its_name(tmp_path, text):
    (tmp_path / "record.json").write_bytes(text)
    with pytest.raises(UserError, match=r"record\.json"):
        files.read_json(tmp_path / "record.json")


def test_no_flipped_bit_of_a_sealed_record_is_read_as_another(tmp_path):
    path = tmp_path / "record.json"
    record = {
        "step": 18,
        "seed": 7,
        "name": "best",
        "parts": [{"file": "a", "bytes": 5}],
        "lr": 1e-3,
    }
    files.write_sealed(path, record)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found = files.read_record(path, "record")
        except UserError:
            continue
        assert found == record


@pytest.mark.parametrize(
    "name",
    ["../thesis", "/etc/passwd", "a/../../thesis", "..", "", ".", "a\0b", "a//b", None, 5, ["a"]],
)
def test_a_name_of_a_manifest_never_leads_out_of_its_folder(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "thesis").touch()
    ((_, fault),) = walk(tmp_path / "folder", [{"name": name, "sha256": None}], beside=())
    assert "leads out" in fault


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_that_finds_no_room_is_named(tmp_path, number, capsys):
    def write():
        with files.atomic(tmp_path / "table.json"):
            raise OSError(number, os.strerror(number))  # as a write says it

    with pytest.raises(OSError, match="table.json"):
        write()
    assert not any(tmp_path.iterdir())
    if number != errno.EIO:
        assert (
            cli.exit_code(write, "--help") == 2
            and f"{tmp_path}/table.json" in capsys.readouterr().err
        )


def test_a_folder_of_many_files_is_not_listed_for_each(tmp_path, monkeypatch):
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    for number in range(20):
        write_json(tmp_path / f"{number}.json", {})
    assert len(listed) <= 1
