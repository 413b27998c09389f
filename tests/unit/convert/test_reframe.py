"""BOS and ends of documents put on and taken off, against Python lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenscale.data.stores.documents import Chunk
from tokenscale.data.stores.foreign import reframe

DOCUMENTS = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=8)


def flat(documents):
    return np.array([i for d in documents for i in d], np.int64), np.array([len(d) for d in documents], np.int64)


@given(DOCUMENTS, st.sampled_from([0, 1, None]))
def test_documents_are_trimmed_as_python_lists_are(documents, end):
    """BOS 0; the end is 1, or BOS itself, or there is none."""
    ids, lengths = flat(documents)
    first, last = reframe.find_texts(ids, lengths, 0, end)
    for document, start, a, b in zip(documents, np.cumsum(lengths) - lengths, first, last, strict=True):
        right = list(document)
        while right and right[-1] == end:
            right.pop()
        while right and right[0] == 0:
            right.pop(0)
        assert ids[a:b].tolist() == right and start <= a <= b


@given(DOCUMENTS, st.booleans(), st.sampled_from([1, None]))
def test_documents_leave_as_python_lists_do(documents, keep_bos, end):
    documents = [[0, *document] for document in documents]
    ids, lengths = flat(documents)
    count = reframe.ExportCounts()
    found = reframe.export_chunk(Chunk(ids.astype(np.int32), lengths), reframe.ExportFraming(keep_bos, end), count)
    right = [d if keep_bos else d[1:] for d in documents]
    added = [end is not None and d[-1:] != [end] for d in right]
    right = [d + [end] * more for d, more in zip(right, added, strict=True)]
    assert [d.tolist() for d in found.documents()] == right
    assert (count.document_ends_added, count.tokens) == (sum(added), sum(map(len, right)))
