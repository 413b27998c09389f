"""Memory of making tokens does not grow with the text: allocations of Arrow, Python and NumPy are
counted.
"""

import random
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import make_corpus, make_tokenizer
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.corpus.read import read_texts
from tokenscale.data.stores import text
from tokenscale.data.stores.writing import write_store
from tokenscale.settings.data import SourceSettings, StoreSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(11)]

DOCUMENTS = 2000
LARGE = 6000
#: of one document; letters at random, so that nothing gets smaller in a file
CHARACTERS = 2000
STORES = [
    StoreSettings("token-list", row_group_rows=20),
    StoreSettings("packed", sequence_length=2048),
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same kind of text twice, once three times as much; and a tokenizer."""
    folder = tmp_path_factory.mktemp("memory")
    chance = random.Random(0)
    for name, count in (("first", 20), ("small", DOCUMENTS), ("large", LARGE)):
        texts = [chance.randbytes(CHARACTERS // 2).hex() for _ in range(count)]
        make_corpus(folder / name, texts, row_group_rows=20)
    make_tokenizer(folder / "tokenizer", folder / "small", 262)
    return folder


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.format)
def test_memory_of_writing_a_store_does_not_grow_with_the_text(
    corpora, tmp_path, monkeypatch, store
):
    monkeypatch.setattr(text, "BATCH_BYTES", 1 << 16)
    peaks = {}
    for size in ("first", "small", "large"):  # the first one pays for what is imported late
        held = [pa.total_allocated_bytes()]
        tracemalloc.start()
        try:
            note = lambda *counts, held=held: held.append(pa.total_allocated_bytes())  # noqa: E731
            write_store(store, corpora / size, corpora / "tokenizer", tmp_path / size, note)
            peaks[size] = max(held) - held[0] + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peaks["large"] - peaks["small"] < (LARGE - DOCUMENTS) * CHARACTERS / 2, peaks


def test_reading_a_corpus_keeps_nothing_of_what_was_read(corpora):
    reader = RawText(corpora / "large")
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in reader.columns(10)]
    assert max(held) < LARGE * CHARACTERS / 10


def test_reading_a_users_file_keeps_nothing_of_what_was_read(corpora, tmp_path):
    """Its row groups are as large as the user made them: all of this file is one."""
    path = tmp_path / "one-group.parquet"
    column = pa.chunked_array(list(RawText(corpora / "large").columns()) * 4)
    pq.write_table(pa.table({"text": column}), path, compression="none")
    del column
    before = pa.total_allocated_bytes()
    source = SourceSettings(kind="files", files=(str(path),))
    held = [pa.total_allocated_bytes() - before for _ in read_texts(path, source)]
    assert len(held) == 4 * LARGE and max(held) < 4 * LARGE * CHARACTERS / 4
