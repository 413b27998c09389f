"""Document ids say what the pieces of a row say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import make_run
from tokenscale.data.batches.batch import document_ids
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore

T = 16
#: rows of T positions, each as the lengths of its pieces; what is left is padding
ROWS = st.lists(st.lists(st.integers(1, T), min_size=1, max_size=6).filter(lambda row: sum(row) <= T + 1), max_size=5)


def starts_of(rows):
    """As a packed store marks them: where pieces begin among the T inputs of a row of T + 1."""
    starts = np.zeros((len(rows), T), dtype=bool)
    for row, lengths in zip(starts, rows, strict=True):
        begins = np.cumsum([0, *lengths])  # the last: of the padding
        row[begins[begins < T]] = True
    return starts


def pieces_of(rows):
    """Each row's pieces as lists of positions, padding as one more: by counting, one token after another."""
    for lengths in rows:
        piece_of = [piece for piece, length in enumerate(lengths) for _ in range(length)][:T]
        piece_of += [len(lengths)] * (T - len(piece_of))
        yield piece_of


@given(ROWS)
def test_every_token_has_the_number_of_its_piece_and_padding_a_number_of_its_own(rows):
    ids = document_ids(starts_of(rows))
    assert ids.dtype == np.int32 and ids.shape == (len(rows), T)
    assert ids.tolist() == list(pieces_of(rows))


def test_they_agree_with_the_pieces_of_a_real_store(lab):
    settings = make_run("packed", sequence_length=T).store
    folder = lab.store(settings)
    store = PackedStore(folder, open_store(folder, settings))
    pieces, pointers = np.load(folder / "pieces.npy"), np.load(folder / "rows.npy")
    rows = [pieces[a:b].tolist() for a, b in zip(pointers[:-1], pointers[1:], strict=True)]
    assert any(len(row) > 2 for row in rows) and any(sum(row) < T for row in rows)
    starts = store.starts(np.arange(len(store)))
    assert document_ids(starts).tolist() == list(pieces_of(rows))
    _, labels = store.rows(np.arange(len(store)))
    ids = document_ids(starts)
    crossing = ids[:, 1:] != ids[:, :-1]
    assert (labels[:, :-1][crossing] == -100).all()  # no label that counts is predicted over a border


@pytest.mark.parametrize("starts", [np.zeros((2, 4), dtype=bool), np.ones((2, 4), dtype=np.int64)])
def test_what_are_no_starts_is_refused(starts):
    with pytest.raises(ValueError, match="every row begins"):
        document_ids(starts)
