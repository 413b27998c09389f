"""Pairs of Megatron-LM: the bytes of an index, every type, and every truncation refused."""

import pytest

from tests.unit.convert.conftest import KNOWN, documents_of, refused, run, write_hf, write_megatron


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


def test_half_a_pair_and_a_multimodal_one_are_refused(tmp_path):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.idx").write_bytes((tmp_path / "m.idx").read_bytes() + b"\0\1")
    assert "multimodal" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    (tmp_path / "m.bin").unlink()
    assert "a file of the pair is missing" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
