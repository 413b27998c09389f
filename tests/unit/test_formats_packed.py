"""Documents of a packed store, put together again from the pieces that its rows hold."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from tests.unit.conftest import TEXTS, T
from tokenscale.base.errors import UserError
from tokenscale.data.stores import packed
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.parquet import TokenListStore
from tokenscale.settings.data import StoreSettings

STORES = [StoreSettings("packed", sequence_length=T, packing=packing) for packing in ("best-fit", "concatenate")]


@pytest.fixture(scope="module")
def documents(large_lab):
    store = StoreSettings("token-list")
    reader = TokenListStore(large_lab.store(store), open_store(large_lab.store(store), store))
    return [d.tolist() for chunk in reader.chunks(0, len(TEXTS)) for d in chunk.documents()]


def opened(large_lab, store, path=None):
    path = path or large_lab.store(store)
    return PackedStore(path, open_store(path, store))


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.packing)
@pytest.mark.parametrize("tokens", [1, 100, 1 << 20])
def test_documents_come_back_whole_and_in_order_from_any_of_them_on(large_lab, documents, monkeypatch, store, tokens):
    monkeypatch.setattr(packed, "CHUNK_TOKENS", tokens)
    reader, count = opened(large_lab, store), len(TEXTS)
    for first, last in [(0, count), (0, 1), (7, 40), (count - 1, count), (5, 5)]:
        chunks = list(reader.chunks(first, last))
        assert [d.tolist() for chunk in chunks for d in chunk.documents()] == documents[first:last]
        longest = max((len(d) for d in documents), default=0)
        assert all(len(chunk.ids) <= max(tokens, longest) and chunk.ids.dtype == np.int32 for chunk in chunks)
        assert all(len(a.ids) + len(b.ids) > tokens for a, b in pairwise(chunks))  # no smaller than they need to be


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.packing)
def test_a_row_that_has_changed_gives_no_documents(large_lab, tmp_path, store):
    path = tmp_path / "store"
    shutil.copytree(large_lab.store(store), path)
    tokens = path / "tokens.bin"
    for at in np.linspace(0, tokens.stat().st_size - 1, 10).astype(int).tolist():
        content = bytearray((large_lab.store(store) / "tokens.bin").read_bytes())
        content[at] ^= 1
        tokens.write_bytes(content)
        with pytest.raises(UserError, match="a row of the token store has changed"):
            list(opened(large_lab, store, path).chunks(0, len(TEXTS)))
