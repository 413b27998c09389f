"""Bytes that the disk delivers for a batch in random order, from stores that are not in the page cache."""

from pathlib import Path

import numpy as np
import pytest

from tokenscale.benchmark import machine
from tokenscale.data.stores import packed
from tokenscale.data.stores.documents import Chunk, Origin
from tokenscale.data.stores.manifest import load_format, load_reader, open_store
from tokenscale.settings.data import StoreSettings

DOCUMENTS, TOKENS = 6000, 1025


class NumberedDocuments:
    """Documents of 1,025 random ids; see `documents.Documents`."""

    origin = Origin({"name": "ids", "kind": "ids", "file_sha256": ""}, 1 << 16, 0, None, 1, {"text_sha256": ""})
    report = None

    def __len__(self):
        return DOCUMENTS

    def chunks(self, first, last):
        ids = np.random.default_rng(0).integers(2, 1 << 16, (DOCUMENTS, TOKENS), dtype=np.int32)
        yield Chunk(ids[first:last].ravel(), np.full(last - first, TOKENS, dtype=np.int64))

    def confirm(self):
        pass


@pytest.fixture
def read_bytes():
    def read():
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))

    return read


@pytest.mark.parametrize("form", ["packed", "token-list", "padded"])
def test_a_cold_batch_reads_its_rows_and_the_pages_they_begin_and_end_in(tmp_path, form, monkeypatch, read_bytes):
    """A row of 2,050 bytes lies on 1.5 pages on average, and as much again is allowed for the tables beside the rows.
    With the kernel's read-ahead of 128 KiB a row would cost 32 pages, with a Parquet row group all rows."""
    monkeypatch.setattr(packed, "POPULATE_BYTES", 1 << 20)
    store = StoreSettings(form, **({} if form == "token-list" else {"sequence_length": TOKENS - 1}))
    load_format(form).write(store, NumberedDocuments(), tmp_path)
    files = [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".npy", ".parquet")]
    manifest = open_store(tmp_path, store)
    if reason := machine.explain_warm_cache(machine.drop_page_cache(files)):
        pytest.skip(reason)
    reader, before = load_reader(form)(tmp_path, manifest), read_bytes()
    rows = np.random.default_rng(1).permutation(DOCUMENTS)[:200]
    for some in np.split(rows, 25):
        if form == "token-list":
            [reader.document(i) for i in some.tolist()]
        else:
            reader.rows(some)
    assert 200 * 2050 < read_bytes() - before < 200 * 3 * 4096


def test_rows_that_were_announced_are_read_ahead(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(packed, "POPULATE_BYTES", 1 << 20)
    store = StoreSettings("packed", sequence_length=TOKENS - 1)
    load_format("packed").write(store, NumberedDocuments(), tmp_path)
    manifest = open_store(tmp_path, store)
    if reason := machine.explain_warm_cache(machine.drop_page_cache([Path(tmp_path / "tokens.bin")])):
        pytest.skip(reason)
    reader = packed.PackedStore(tmp_path, manifest)
    before, rows = read_bytes(), np.arange(0, DOCUMENTS, 100)
    reader.will_read(rows)
    asked = read_bytes() - before
    assert asked >= len(rows) * 2050
    reader.rows(rows)
    assert read_bytes() - before == asked
