"""No room, no right, a read-only file system: every job says so in one message, and the same call
then ends well.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.corpora import make_tokenizer
from tokenscale.analysis.run_record import read_run_record
from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder, naming, open_file
from tokenscale.base.manifests import open_checked
from tokenscale.cli.main import translate_error
from tokenscale.data.tokenizers import huggingface

NAMESPACE = ["unshare", "--mount", "--propagation", "private"]
#: fault → what every job says
SAID = {
    "readonly": "tokenscale: the file system is read-only.",
    "denied": "tokenscale: permission denied for this file or folder.",
}
#: what a call says that runs out of bytes, or of files
SHORT = ("the disk is full.", "the file system can hold no more files.")


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


@pytest.mark.long
def test_a_whole_call_that_runs_out_of_room_says_so_and_the_next_completes(stages, tmp_path):
    *calls, last = in_namespace(stages.folder, tmp_path, "calls")
    for (short, whole), said in zip((calls[:2], calls[2:]), SHORT, strict=True):
        assert (
            short["code"] != 0
            and f"tokenscale: {said}" in short["said"]
            and "Traceback" not in short["said"]
        ), short
        assert whole["code"] == 0, whole
    assert "df -i" in calls[2]["said"]
    assert last == {"lost": []}


def test_every_job_says_what_it_lacks_and_then_makes_what_it_would_have_made(stages, tmp_path):
    *jobs, last = in_namespace(stages.folder, tmp_path, "jobs")
    assert {job["fault"] for job in jobs} == {*SAID} and len(jobs) >= 2 * 14
    assert {"corpus", "pretokenize", "launch", "ingest", "report"} <= {
        job["job"][0] for job in jobs
    }
    for job in jobs:
        assert job["code"] == 2 and SAID[job["fault"]] in job["said"], job
        assert "Traceback" not in job["said"] and "  next  " in job["said"]
        assert not job["gone"] and not job["left"], "nothing is lost, nothing half-written stays"
        assert job["again"] == 0, job["then"]
    # each training but the first was copied, and lists of code are written by Snakemake, which is
    # not here
    other = ("runs/", "steps of", "table", "code/")
    compared = {
        name: value for name, value in stages.expected.items() if not name.startswith(other)
    }
    assert len(compared) > 60 and {name: last["lies"].get(name) for name in compared} == compared


@pytest.mark.parametrize(
    "error",
    [
        OSError("10247 requested and 4080 written"),
        OSError(28, "x"),
        RuntimeError("No space left on device"),
    ],
)
def test_a_disk_that_took_a_part_is_full_whoever_wrote(error):
    said = translate_error(error).render()
    assert said.startswith("tokenscale: the disk is full.") and os.getcwd() in said
    assert translate_error(OSError("10247 requested and 10247 read")) is None


SYSTEM = ("EIO", "ESTALE", "EMFILE", "ENFILE", "EFBIG", "ENOLCK", "ETIMEDOUT", "EINTR", "EBUSY")
SYSTEM += ("EREMOTEIO", "ENXIO", "ENODEV", "ETXTBSY", "EDEADLK", "ENOTCONN", "EHOSTDOWN")


@pytest.mark.parametrize("name", SYSTEM)
@pytest.mark.parametrize("path", [None, "results/x.json"])
def test_what_the_system_refuses_is_told_with_its_place_and_reason(name, path):
    number = getattr(errno, name)
    said = translate_error(OSError(number, os.strerror(number), path)).render()
    assert os.strerror(number) in said and (path or os.getcwd()) in said
    assert "then repeat the command" in said


@pytest.mark.parametrize("form", ["Error closing file <{}>: {} ({})", "{}: {} (os error {})"])
def test_the_systems_number_is_found_in_the_message_of_a_library(form):
    """torch raises a RuntimeError, libraries in Rust errors of their own."""
    path = "final/rank=00001.safetensors"
    reason = form.format(path, os.strerror(errno.EFBIG), errno.EFBIG)
    said = translate_error(RuntimeError(reason)).render()
    assert "the system refused" in said and reason in said
    assert translate_error(RuntimeError("a shape of (27)")) is None


def test_a_file_for_which_memory_is_lacking_is_named():
    error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "results/manifest.json")
    assert "path    results/manifest.json" in translate_error(error).render()


def test_a_checked_file_that_cannot_be_closed_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(OSError) as caught, open_checked(tmp_path, "a.bin", 3, what="x", next="y"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert caught.value.filename == str(tmp_path / "a.bin")


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ENODEV, errno.EISDIR])
def test_a_regular_file_that_a_disk_refuses_is_not_called_a_pipe(tmp_path, monkeypatch, number):
    """The next step for a pipe would be to remove it."""
    path = tmp_path / "manifest.json"
    path.write_text("{}")

    def refuse(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError) as caught:
        open_file(path)
    assert caught.value.filename == str(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        open_file(tmp_path / "folder")


def test_a_record_that_a_disk_keeps_back_is_not_called_broken(tmp_path, monkeypatch):
    def refuse(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr("tokenscale.base.files.read_file", refuse)
    found = read_run_record(tmp_path / "run.json")
    assert found.trouble == "run.json cannot be read: Input/output error"


def test_a_lock_that_cannot_be_closed_hides_no_error(tmp_path):
    """Its descriptor is closed early here, so that the close fails."""
    with pytest.raises(ValueError, match="first"), lock_folder(tmp_path, what="it") as descriptor:
        os.close(descriptor)
        raise ValueError("first")


def test_a_file_that_pyarrow_cannot_close_is_named():
    """Network file systems report a failed write when the file is closed; pyarrow loses its
    number.
    """
    with pytest.raises(OSError, match="closing") as caught, naming("results/shard.parquet"):
        raise OSError("error closing file")
    said = translate_error(caught.value).render()
    assert "results/shard.parquet" in said and "error closing file" in said
    assert "\n  next  " in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_system(lab, tmp_path, monkeypatch):
    """The package `tokenizers` raises a plain Exception where it writes a file itself."""
    monkeypatch.setattr(huggingface, "atomic", lambda path: nullcontext(Path("/dev/full")))
    with pytest.raises(OSError) as caught:
        make_tokenizer(tmp_path, lab.corpus)
    assert caught.value.errno == errno.ENOSPC


def test_a_mistake_in_the_code_keeps_its_trace():
    assert translate_error(FileNotFoundError(errno.ENOENT, "gone", "x")) is None
    assert translate_error(OSError(errno.EBADF, "closed")) is None


def test_weights_have_the_rights_of_all_other_files(tmp_path):
    modes = {0o022: 0o644, 0o077: 0o600, 0o002: 0o664}
    code = f"""
import os, torch
from pathlib import Path
for umask in {[*modes]}:
    if os.fork() == 0:
        os.umask(umask)  # as of a process that is started with it
        from tokenscale.train.checkpoint import Piece, State, write_rank
        write_rank(Path({str(tmp_path)!r}, str(umask)), 0, State({{"model.a": Piece.of(torch.zeros(2))}}))
        os._exit(0)
    assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for umask, mode in modes.items():
        files = [*(tmp_path / f"{umask}.partial").iterdir()]
        assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_a_library_that_finds_no_folder_for_temporary_files_is_one_message(monkeypatch):
    """As with `ulimit -f 0`, where torch asks for one while it is imported."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    said = translate_error(caught.value).render()
    assert "/proc/none" in said and "export TMPDIR=FOLDER" in said
