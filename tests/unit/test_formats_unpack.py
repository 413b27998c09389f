"""Several jobs of one node that want the same archive unpacked on its disk."""

import threading

from tests.corpora import Lab
from tokenscale.base.files import lock_folder
from tokenscale.data.stores import unpack
from tokenscale.data.stores.manifest import rebuild_command
from tokenscale.settings.data import StoreSettings

ARCHIVE, PACKED = StoreSettings("archive"), StoreSettings("packed", sequence_length=16)


def test_a_second_job_waits_for_the_first_and_takes_what_it_made(tmp_path):
    lab = Lab(tmp_path / "lab", ["some words", "and others"])
    archive, disk, found = lab.store(ARCHIVE), tmp_path / "disk", []
    second = threading.Thread(target=lambda: found.append(unpack.unpack_once(archive, PACKED, disk)), daemon=True)
    with lock_folder(disk / PACKED.directory, "the store"):  # the first job, at work
        second.start()
        second.join(0.3)
        assert second.is_alive() and not found
        unpack.packed.write(PACKED, unpack.ArchiveDocuments(archive), disk / PACKED.directory)
    second.join(20)
    assert found == [(disk / PACKED.directory / "manifest.json", False)]


def test_what_is_damaged_on_a_nodes_disk_names_the_verb(tmp_path):
    lab = Lab(tmp_path / "lab", ["some words", "and others"])
    path, _ = unpack.unpack_once(lab.store(ARCHIVE), PACKED, tmp_path / "disk")
    words = f"--archive {lab.store(ARCHIVE)} --store {PACKED.directory} --local-disk {tmp_path / 'disk'}"
    assert rebuild_command(path) == f"python -m tokenscale unpack {words}"
