"""What `doctor` says of folders: what their file systems cannot do, and where room is short."""

import errno
import os
import shutil

import pytest

from tests.machines import asked
from tokenscale.cli import doctor_checks


def test_a_good_folder_passes_every_trial_and_is_left_empty(tmp_path):
    trial = doctor_checks.try_folder(tmp_path)
    assert trial["failed"] == {} and abs(trial["clock_skew_s"]) < 5 and trial["fsync_s"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = doctor_checks.check_results_folder(asked(tmp_path / "file"))
    assert found.verdict == "no" and "create fails: Not a directory" in found.fact

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(doctor_checks.tempfile, "TemporaryDirectory", read_only)
    found = doctor_checks.check_results_folder(asked(tmp_path))
    assert found.verdict == "no" and "create fails: Read-only file system" in found.fact and "writable" in found.next


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_no(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in doctor_checks.check_results_folder(asked(tmp_path)).fact


@pytest.mark.parametrize(
    "step, name, replacement",
    [
        ("fsync", "os.fsync", OSError(errno.EINVAL, "Invalid argument")),
        ("rename", "os.replace", OSError(errno.EXDEV, "Invalid cross-device link")),
        ("rename", "os.replace", lambda new, old: None),  # says it did, and did not
        ("flock", "run_command", lambda *args, **kwargs: (0, "")),  # two processes hold it
        ("flock", "fcntl.flock", OSError(errno.ENOSYS, "Function not implemented")),  # Lustre without the option flock
        ("memory map", "mmap.mmap", OSError(errno.ENODEV, "No such device")),
    ],
)
def test_what_a_file_system_cannot_do_is_named(tmp_path, monkeypatch, step, name, replacement):
    def replaced(*args, **kwargs):
        if isinstance(replacement, Exception):
            raise replacement
        return replacement(*args, **kwargs)

    import fcntl

    owners = {"os": doctor_checks.os, "mmap": doctor_checks.mmap, "fcntl": fcntl, "run_command": doctor_checks}
    monkeypatch.setattr(owners[name.split(".")[0]], name.split(".")[-1], replaced)
    found = doctor_checks.check_results_folder(asked(tmp_path))
    assert found.verdict == "no" and f"{step} fails: " in found.fact, found
    assert list(found.values["failed"]) == [step]
    if name == "run_command":
        assert "two processes acquired the same lock" in found.fact


@pytest.mark.parametrize("free, verdict", [(10**6, "no"), (10**9, "note"), (10**11, "ok")])
def test_a_full_disk_is_no(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free))
    monkeypatch.setattr(doctor_checks, "find_file_system", lambda folder: "ext4")
    assert doctor_checks.check_results_folder(asked(tmp_path)).verdict == verdict


@pytest.mark.parametrize(
    "kind, words",
    [
        ("nfs4", "latency-wait"),
        ("lustre", "latency-wait"),
        ("fuse.sshfs", "latency-wait"),
        ("tmpfs", "lost on reboot"),
        ("overlay", "inside a container"),
    ],
)
def test_what_a_kind_of_file_system_means_is_told(monkeypatch, tmp_path, kind, words):
    monkeypatch.setattr(doctor_checks, "find_file_system", lambda folder: kind)
    found = doctor_checks.check_results_folder(asked(tmp_path))
    assert found.verdict == "note" and words in f"{found.fact} {found.next}" and f"file system {kind}" in found.fact


def test_a_clock_that_differs_between_disk_and_machine_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks, "find_file_system", lambda folder: "ext4")
    monkeypatch.setattr(doctor_checks, "_clock_skew", lambda path: -90.0)
    found = doctor_checks.check_results_folder(asked(tmp_path))
    assert found.verdict == "note" and "-90 s off" in found.fact


def test_the_type_of_a_file_system_is_that_of_df(monkeypatch, tmp_path):
    assert doctor_checks.find_file_system(tmp_path) == os.popen(f"df --output=fstype {tmp_path}").read().split()[-1]
    monkeypatch.setenv("PATH", "")
    assert doctor_checks.find_file_system(tmp_path) == "unknown"
