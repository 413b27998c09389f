"""The corpus `grammar`: its script makes its files again, and what is held out is unseen."""

import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.corpora import GRAMMAR


@pytest.fixture(scope="module")
def splits():
    return [pq.read_table(GRAMMAR / f"{split}.parquet").to_pylist() for split in ("train", "validation")]


def test_the_script_makes_the_files_again(splits, tmp_path):
    subprocess.run([sys.executable, GRAMMAR / "generate.py", tmp_path], check=True)
    for split, pairs in zip(("train", "validation"), splits, strict=True):
        made, kept = tmp_path / f"{split}.parquet", GRAMMAR / f"{split}.parquet"
        assert pq.read_table(made).to_pylist() == pairs
        if pq.read_metadata(made).created_by == pq.read_metadata(kept).created_by:  # the same version of pyarrow
            assert made.read_bytes() == kept.read_bytes()


def test_no_held_out_sentence_is_trained_on_and_all_of_its_words_are(splits):
    training, held_out = splits
    for language in ("german", "english"):
        seen, unseen = ({pair[language] for pair in pairs} for pairs in (training, held_out))
        assert (len(training), len(held_out)) == (4000, 500) and not seen & unseen
        words, known = (set(re.findall(r"\w+", " ".join(texts).lower())) for texts in (unseen, seen))
        assert words <= known
