"""Runs against each other, from rows alone."""

from types import SimpleNamespace

import pytest

from tokenscale.referee.siblings import _find_other_cuts

STORE = {
    "corpus": "web",
    "tokenizer": "bpe",
    "sequence_length": 128,
    "format": "padded",
    "split": "train",
    "cut_tokens": 400,
    "document_tokens": 1010,
    "documents": 10,
}


@pytest.mark.parametrize(
    ("counted", "stored", "accused"),
    [
        ([0.4, 0.4, 0.4], True, []),
        ([0.41, 0.41, 0.41], True, []),  # of a sample
        ([0.41, 0.41, 0.4101], False, [2]),
        ([0.5, 0.5, 0.5], True, [0, 1, 2]),
        ([0.5, 0.5, 0.5], False, []),
        ([None, None, None], True, []),
    ],
)
def test_a_share_of_cut_text_is_that_of_other_runs_and_of_the_padded_store(
    counted, stored, accused
):
    rows = {
        str(number): {
            "corpus": "web",
            "tokenizer": "bpe",
            "sequence_length": 128,
            "text_cut": None if share is None else f'{{"web":{share}}}',
        }
        for number, share in enumerate(counted)
    }
    siblings = SimpleNamespace(
        rows=rows,
        stores={"sha": STORE} if stored else {},
        groups=lambda *columns: [[*rows]],
    )
    assert [int(run) for run, _ in _find_other_cuts(siblings)] == accused
