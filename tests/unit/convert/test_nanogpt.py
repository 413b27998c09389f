"""Single files of nanoGPT: ids without bounds, whose documents end in an id."""

import numpy as np
import pytest

from tests.unit.convert.conftest import KNOWN, digest, documents_of, refused, run, write_hf


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_nanogpt_ids_are_uint16_where_they_fit(tmp_path, size, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3, 1], [0]])
    told = run(source, tmp_path / "n.bin", to="nanogpt", vocabulary_size=size, bos_id=0, eos_id=1)
    assert np.fromfile(tmp_path / "n.bin", dtype).tolist() == [size - 1, 1, 3, 1, 1]
    assert ("uint32: nanoGPT's train.py reads uint16" in told) == (dtype == "<u4")
    run(tmp_path / "n.bin", tmp_path / "s", to="token-list")
    assert documents_of(tmp_path / "s") == [[0, size - 1], [0, 3], [0]]


def test_gpt2s_one_id_for_all_purposes(tmp_path):
    """As prepare.py of nanoGPT writes it: BOS, EOS and the end of a document are 50256."""
    np.array([5, 6, 50256, 7, 50256, 50256], "<u2").tofile(tmp_path / "train.bin")
    told = run(tmp_path / "train.bin", tmp_path / "s", to="token-list", **_gpt2())
    assert documents_of(tmp_path / "s") == [[50256, 5, 6], [50256, 7], [50256]]
    assert "3 of id 50256" in told and "documents without text tokens: 1" in told


def _gpt2():
    return {"vocabulary_size": 50257, "bos_id": 50256, "eos_id": 50256}


def test_an_id_in_front_of_each_document_is_understood(tmp_path):
    np.array([1, 5, 6, 1, 7], "<u2").tofile(tmp_path / "train.bin")
    told = run(tmp_path / "train.bin", tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7]] and "before each document" in told


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (b"\x05\x00\x01", KNOWN, "cut short"),
        (b"", KNOWN, "cut short"),
        (np.array([5, 1, 6], "<u2").tobytes(), KNOWN, "does not end"),
        (np.array([5, 6, 6], "<u2").tobytes(), KNOWN, "no document ends"),
        (np.array([5, 100, 1], "<u2").tobytes(), KNOWN, "outside the vocabulary"),
        (np.array([5, 0, 6, 1], "<u2").tobytes(), KNOWN, "BOS lies inside a document"),
        (np.array([5, 1], "<u2").tobytes(), {"vocabulary_size": 100, "bos_id": 0}, "which id ends a document"),
        (np.array([5, 1], "<u2").tobytes(), {**KNOWN, "document_end": 100}, "--document-end is outside"),
        (np.array([5, 1], "<u2").tobytes(), {**KNOWN, "bos_id": 100}, "--bos-id is outside"),
        (np.array([5, 1], "<u2").tobytes(), {"bos_id": 0}, "--vocabulary-size N"),
        (np.array([20240520, 1, 5, 1], "<i4").tobytes(), {**KNOWN, "dtype": "uint32"}, "has a header"),
        (np.array([5, 1, 6, 1], "<u4").tobytes(), {**KNOWN, "dtype": "uint16"}, "does not end"),
    ],
)
def test_what_a_nanogpt_file_contradicts_is_refused(tmp_path, data, settings, words):
    (tmp_path / "train.bin").write_bytes(data)
    text = refused(tmp_path / "train.bin", tmp_path / "s", to="token-list", **settings)
    assert words in text and "next" in text


def test_an_end_inside_a_document_cannot_leave_for_nanogpt(tmp_path):
    run(write_hf(tmp_path / "hf", tokens=[[5, 6], [7, 9, 8]]), tmp_path / "s", to="token-list", **KNOWN)
    text = refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=9)
    assert "lies inside one" in text and "1 of 2" in text
    assert "outside the vocabulary" in refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=100)


def test_a_tokenizer_without_an_end_needs_one_for_nanogpt(tmp_path):
    facts = {"vocabulary_size": 100, "bos_id": 0}
    run(write_hf(tmp_path / "hf", tokens=[[5, 6], [7]]), tmp_path / "s", to="token-list", **facts)
    assert "--document-end ID" in refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt")
    run(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=99)
    run(tmp_path / "n.bin", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(tmp_path / "s")
