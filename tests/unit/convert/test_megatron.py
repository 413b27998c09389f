"""Pairs of Megatron-LM: the bytes of an index, every type, and every wrong or missing byte refused."""

import numpy as np
import pytest

from tests.unit.conftest import TEXTS
from tests.unit.convert.conftest import KNOWN, digest, documents_of, ours, refused, run, write_hf, write_megatron


def test_the_bytes_of_a_megatron_pair(tmp_path):
    """Documents [7, 8] and [9] behind BOS 0, as Megatron-LM's reader wants them."""
    run(write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]), tmp_path / "m", to="megatron", **KNOWN)
    assert (tmp_path / "m.bin").read_bytes() == bytes.fromhex("0000 0700 0800 0000 0900")
    assert (tmp_path / "m.idx").read_bytes() == bytes.fromhex(
        "4d4d494449445800 00"  # MMIDIDX, two zeros
        "0100000000000000 08"  # version 1, uint16
        "0200000000000000 0300000000000000"  # two sequences, three document bounds
        "03000000 02000000"  # lengths
        "0000000000000000 0600000000000000"  # where they begin
        "0000000000000000 0100000000000000 0200000000000000"  # documents
    )


@pytest.mark.parametrize(
    ("size", "code", "dtype"), [(65_499, 8, "<u2"), (65_500, 4, "<i4"), (65_536, 4, "<i4"), (131_072, 4, "<i4")]
)
def test_megatron_ids_are_uint16_below_65500_ids(tmp_path, size, code, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3]])
    run(source, tmp_path / "m", to="megatron", vocabulary_size=size, bos_id=0)
    assert (tmp_path / "m.idx").read_bytes()[17] == code
    assert np.fromfile(tmp_path / "m.bin", dtype).tolist() == [0, size - 1, 0, 3]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_type_of_megatron_is_read_and_sequences_join_to_documents(tmp_path, code, dtype):
    source = write_megatron(tmp_path / "m", [[5], [6, 7], [8], [9, 1]], code, dtype, bounds=[0, 2, 2, 4])
    for path in (source, tmp_path / "m.bin", tmp_path / "m.idx"):
        run(path, tmp_path / f"s{path.suffix}", to="token-list", **KNOWN)
        assert documents_of(tmp_path / f"s{path.suffix}") == [[0, 5, 6, 7], [0], [0, 8, 9]]


@pytest.mark.parametrize("length", range(0, 34 + 2 * 12 + 3 * 8))
def test_every_truncation_of_an_index_is_refused(tmp_path, length):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.idx").write_bytes((tmp_path / "m.idx").read_bytes()[:length])
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", from_format="megatron", **KNOWN)
    assert "m.idx" in text and "found" in text and "expected" in text and "next" in text


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (0, b"MMIDIDY", "no Megatron index"),
        (9, b"\x02", "another version"),
        (17, b"\x06", "no integers"),
        (17, b"\x00", "no integers"),
        (18, b"\xff" * 8, "another size than its header says"),
        (18, b"\x03", "another size than its header says"),
        (26, b"\x02", "another size than its header says"),
        (34, b"\xff\xff\xff\xff", "negative length"),
        (34, b"\x01", "points elsewhere"),
        (50, b"\x06", "points elsewhere"),
        (42, b"\x02", "points elsewhere"),
        (58, b"\x01", "out of order"),
        (66, b"\x03", "out of order"),
        (74, b"\x01", "out of order"),
    ],
)
def test_a_wrong_byte_of_an_index_is_refused(tmp_path, at, change, words):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    index = bytearray((tmp_path / "m.idx").read_bytes())
    index[at : at + len(change)] = change
    (tmp_path / "m.idx").write_bytes(index)
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", from_format="megatron", **KNOWN)
    assert words in text and "m.idx" in text and "expected" in text


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0\0", lambda b: b""])
def test_a_bin_of_another_size_than_its_index_says_is_refused(tmp_path, change):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.bin").write_bytes(change((tmp_path / "m.bin").read_bytes()))
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    assert "another size than its index says" in text and "6 bytes" in text


def test_half_a_pair_and_a_multimodal_one_are_refused(tmp_path):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.idx").write_bytes((tmp_path / "m.idx").read_bytes() + b"\0\1")
    assert "multimodal" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    (tmp_path / "m.bin").unlink()
    assert "a file of the pair is missing" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)


def test_a_pair_whose_documents_do_not_end_says_how_they_would(lab, tmp_path):
    assert "--document-end 1 puts one" in run(ours(lab), tmp_path / "m", to="megatron")
    assert "--document-end" not in run(ours(lab, eos=True), tmp_path / "with", to="megatron")
    told = run(ours(lab), tmp_path / "ended", to="megatron", document_end=1, bos="drop")
    assert "added after documents" in told and "--document-end" not in told
    ids = np.fromfile(tmp_path / "ended.bin", "<u2")
    assert ids[-1] == 1 and np.count_nonzero(ids == 1) == len(TEXTS) and 0 not in ids
    run(tmp_path / "ended", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))
