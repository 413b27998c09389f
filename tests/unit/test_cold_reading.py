"""Bytes that the disk delivers for a batch from stores outside the page cache; what benchmarks ask
of the system.
"""

import functools
import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.unit.conftest import fsync
from tokenscale.base import manifests, page_cache, processes
from tokenscale.data.stores import packed
from tokenscale.data.stores.documents import Chunk, Origin
from tokenscale.data.stores.manifest import load_reader, load_writer, open_store
from tokenscale.settings.data import StoreSettings

DOCUMENTS = 6000
TOKENS = 1025


class NumberedDocuments:
    origin = Origin(
        {"name": "ids", "kind": "ids", "file_sha256": ""}, 1 << 16, 0, None, 1, {"text_sha256": ""}
    )
    report = None

    def __len__(self):
        return DOCUMENTS

    def chunks(self, first, last):
        ids = np.random.default_rng(0).integers(2, 1 << 16, (DOCUMENTS, TOKENS), dtype=np.int32)
        yield Chunk(ids[first:last].ravel(), np.full(last - first, TOKENS, dtype=np.int64))

    def confirm(self):
        pass


def read_bytes():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a function that gives the folder of these documents and its reader. `cold` files leave
    the cache.
    """

    @functools.cache
    def write(form):
        folder = tmp_path_factory.mktemp(form)
        store = StoreSettings(
            form, **({} if form == "token-list" else {"sequence_length": TOKENS - 1})
        )
        load_writer(form)(store, NumberedDocuments(), folder)
        return folder, store

    def open_reader(form, cold=()):
        folder, store = write(form)
        manifest = open_store(folder, store)
        files = [path for path in folder.iterdir() if path.suffix in cold]
        if cold and (reason := page_cache.explain_warm_cache(page_cache.drop_page_cache(files))):
            pytest.skip(reason)
        return folder, load_reader(form)(folder, manifest)

    return open_reader


@pytest.fixture(autouse=True)
def large_files(monkeypatch):
    """Tables of the store are small against the file of its rows, as in a large store. Pages are on
    the disk.
    """
    monkeypatch.setattr(packed, "POPULATE_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("form", ["packed", "token-list", "padded"])
def test_a_cold_batch_reads_its_rows_and_the_pages_they_begin_and_end_in(stored, form):
    """A row of 2,050 bytes lies on 1.5 pages on average, and as much again is allowed for the
    tables beside the rows. With the kernel's read-ahead of 128 KiB a row would cost 32 pages, with
    a Parquet row group all rows.
    """
    _, reader = stored(form, cold=(".bin", ".npy", ".parquet"))
    before = read_bytes()
    for some in np.split(np.random.default_rng(1).permutation(DOCUMENTS)[:200], 25):
        if form == "token-list":
            [reader.document(i) for i in some.tolist()]
        else:
            reader.rows(some)
    assert 200 * 2050 < read_bytes() - before < 200 * 3 * 4096


def note_hash(hashed, check, file, sha256, **facts):
    hashed.append(facts["path"].name)
    check(file, sha256, **facts)


def test_opening_a_packed_store_hashes_nothing_and_training_only_the_tables_of_rows(
    stored, monkeypatch
):
    hashed = []
    monkeypatch.setattr(
        manifests, "check_hash", functools.partial(note_hash, hashed, manifests.check_hash)
    )
    _, reader = stored("packed")
    assert hashed == []
    for _ in range(2):
        reader.rows(np.arange(8))
    assert sorted(hashed) == ["checksums.npy", "pieces.npy", "rows.npy"]
    list(reader.chunks(0, 1))
    assert sorted(hashed) == [
        "checksums.npy",
        "documents.npy",
        "pieces.npy",
        "rows.npy",
        "starts.npy",
    ]


def test_rows_in_the_page_cache_are_read_from_a_mapping_without_requests(stored, monkeypatch):
    """One row a batch is sampled. A row that is not in the page cache brings the requests back."""
    monkeypatch.setattr(packed, "RESIDENT_ROWS", 4)
    folder, reader = stored("packed")
    (folder / "tokens.bin").read_bytes()
    if not reader._is_resident(0, 0):
        pytest.skip("this file system does not tell what is in the page cache")
    requested = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: requested.append(a) or advise(*a))
    batches = np.random.default_rng(1).permutation(DOCUMENTS)[:80].reshape(10, 8)
    one_by_one = [reader.rows(rows)[0].copy() for rows in batches]
    assert "_tokens" not in vars(reader)
    for rows in batches[:4]:
        reader.will_read(rows)
    assert len(requested) == 3 * 8, "the fourth sample in the page cache is enough"
    assert all(
        (reader.rows(rows)[0] == found).all()
        for rows, found in zip(batches, one_by_one, strict=True)
    )
    assert "_tokens" in vars(reader)
    monkeypatch.setattr(os, "preadv", refuse)
    for _ in range(8):
        reader.will_read(batches[0])
    assert 3 * 8 < len(requested) < 3 * 8 + 9 * 8, "of eight calls at least one is sampled"


def refuse(*arguments):
    raise BlockingIOError


def test_rows_that_were_announced_are_read_ahead(stored):
    _, reader = stored("packed", cold=[".bin"])
    before = read_bytes()
    rows = np.arange(0, DOCUMENTS, 100)
    reader.will_read(rows)
    asked = read_bytes() - before
    assert asked >= len(rows) * 2050
    reader.rows(rows)
    assert read_bytes() - before == asked


@pytest.mark.skipif(sys.platform != "linux", reason="mincore and tmpfs of Linux")
def test_files_in_memory_are_kept_and_that_is_seen():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
        (Path(folder) / "empty").touch()
        assert page_cache._count_resident_pages(Path(folder) / "file") == (3, 3)
        assert page_cache.drop_page_cache(Path(folder).iterdir()) == 1.0


def test_a_system_that_cannot_be_asked_is_not_cold_and_a_hundredth_of_the_pages_may_stay(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(page_cache, "_count_resident_pages", lambda path: None)
    assert page_cache.drop_page_cache([tmp_path / "file"]) is None
    assert [page_cache.explain_warm_cache(share) is None for share in (None, 0.01, 0.5)] == [
        False,
        True,
        False,
    ]


@pytest.mark.skipif(
    not processes.available_cores(), reason="the system does not say which cores there are"
)
def test_cores_are_given_back():
    before = processes.available_cores()
    with processes.pin_to_cores({min(before)}):
        assert processes.available_cores() == {min(before)}
    assert processes.available_cores() == before
