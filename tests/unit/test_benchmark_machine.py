"""What the benchmarks ask of the operating system."""

import mmap
import os
import shutil
import sys
from pathlib import Path

import pytest

from tokenscale.benchmark import machine


@pytest.mark.skipif(sys.platform != "linux", reason="mincore and tmpfs of Linux")
def test_files_in_memory_are_kept_and_that_is_seen():
    folder = Path("/dev/shm/tokenscale-test")
    folder.mkdir(exist_ok=True)
    try:
        (folder / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
        (folder / "empty").touch()
        assert machine.drop_page_cache(folder.iterdir()) == 1.0
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore of Linux")
def test_a_file_that_is_mapped_stays_or_goes_but_the_share_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * mmap.PAGESIZE))
    assert path.read_bytes() and machine._count_resident_pages(path) == (8, 8)
    assert 0 <= machine.drop_page_cache([path]) <= 1


def test_a_system_that_cannot_be_asked_is_not_cold(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    monkeypatch.setattr(machine, "_count_resident_pages", lambda path: None)
    assert machine.drop_page_cache([path]) is None
    assert "does not report" in machine.explain_warm_cache(None)


def test_a_hundredth_of_the_pages_may_stay():
    assert machine.explain_warm_cache(0.01) is None
    assert machine.explain_warm_cache(0.5) == "50% of its files stay in the page cache"


@pytest.mark.skipif(not machine.available_cores(), reason="the system does not say which cores there are")
def test_cores_are_given_back():
    before = machine.available_cores()
    with machine.pin_to_cores({min(before)}):
        assert machine.available_cores() == {min(before)}
    assert machine.available_cores() == before
