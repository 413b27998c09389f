"""Folders of Hugging Face data sets: kinds of lists, masks, and what contradicts itself."""

import pyarrow as pa
import pytest

from tests.unit.convert.conftest import KNOWN, documents_of, refused, run, write_hf


def lists(kind, *documents):
    return pa.array(documents, kind)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int32(), 3)]
)
def test_every_kind_of_list_is_read(tmp_path, kind):
    source = write_hf(tmp_path / "hf", text=["a", "b", "c"], tokens=lists(kind, [0, 5, 6], [0, 7, 1], [0, 8, 9]))
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8, 9]]


def test_padding_is_left_out_by_its_mask_and_never_by_its_id(tmp_path):
    ids, mask = [[0, 5, 3, 3], [0, 3, 1, 3]], [[1, 1, 1, 0], [1, 1, 1, 0]]
    told = run(write_hf(tmp_path / "hf", input_ids=ids, attention_mask=mask), tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 3], [0, 3]] and "its attention mask: 2 ids" in told


def test_double_bos_and_double_ends_are_one(tmp_path):
    told = run(write_hf(tmp_path / "hf", input_ids=[[0, 0, 5], [0, 6, 1, 1]]), tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5], [0, 6]]
    assert "3 of BOS 0 (2 documents)" in told and "2 of id 1 (2 documents)" in told


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        ({"input_ids": [[0, 5, 0, 6], [0, 7]]}, {}, "BOS lies inside"),
        ({"input_ids": [[0, 5, 1, 6], [0, 7]]}, {}, "an id that ends documents lies inside"),
        ({"input_ids": [[0, 5], [7]]}, {}, "some documents begin with BOS and others do not"),
        ({"input_ids": [[5], [-1]]}, {}, "found     id -1"),
        ({"input_ids": [[5], [100]]}, {}, "document  1 of 2, token 0 of 1"),
        ({"input_ids": [[5], [2**40]]}, {}, "outside the vocabulary"),
        ({"input_ids": [[5], None]}, {}, "holds a null"),
        ({"input_ids": [[5], [None]]}, {}, "holds a null"),
        ({"input_ids": [[0.5], [1.0]]}, {}, "no lists of ids"),
        ({"input_ids": [5, 6]}, {}, "no lists of ids"),
        ({"text": ["a", "b"]}, {}, "no column of ids"),
        ({"ids": [[5], [6]]}, {"column": "id"}, "did you mean 'ids'"),
        ({"input_ids": [[5], [6]], "attention_mask": [[1], [1, 1]]}, {}, "other lengths"),
        ({"input_ids": [[5], [6]]}, {"eos": True, "eos_id": None}, "no EOS"),
        ({"input_ids": [[5], [6]]}, {"eos_id": 100}, "--eos-id is outside"),
        ({"input_ids": [[5], [6]]}, {"dtype": "uint16"}, "--dtype does not apply from hf-datasets"),
        ({"input_ids": [[5], [6]]}, {"bos": "drop"}, "--bos does not apply"),
        ({"input_ids": [[5], [6]]}, {"sequence_length": 8}, "no rows of one length"),
        ({"input_ids": [[5], [6]]}, {"tokenizer": "nowhere"}, "tokenizer 'nowhere'"),
    ],
)
def test_what_a_data_set_contradicts_is_refused(tmp_path, columns, settings, words):
    source = write_hf(tmp_path / "hf", **columns)
    assert words in refused(source, tmp_path / "s", **{"to": "token-list", **KNOWN, **settings})


def test_a_stream_that_is_cut_is_refused_at_every_length(tmp_path):
    folder = write_hf(tmp_path / "hf", input_ids=[[5, 6], [7], [8], [9, 9, 9], [8]])
    file = folder / "data-00001-of-00002.arrow"
    whole = file.read_bytes()
    for length in range(0, len(whole), 8):
        file.write_bytes(whole[:length])
        text = refused(folder, tmp_path / "s", to="token-list", **KNOWN)
        assert "not a complete Arrow stream" in text and file.name in text
    file.unlink()
    assert file.name in refused(folder, tmp_path / "s", to="token-list", **KNOWN)


def test_a_folder_of_splits_names_them(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train, test" in refused(tmp_path / "d", tmp_path / "s", to="token-list", **KNOWN)
