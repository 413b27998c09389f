import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.peers import Peers
from tokenscale.base.errors import UserError
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.read import has_documents, read_texts
from tokenscale.settings.data import CorpusSettings, SourceSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(30)]

#: writes every folder of this file with the libraries
WRITER = """
import json, sys
from litdata import TokensLoader, optimize
from streaming import MDSWriter
import torch

settings = json.loads(sys.argv[1])
texts, out = settings["texts"], settings["out"]

def plain(i): return texts[i]
def nested(i): return {"id": i, "doc": {"url": "u", "body": texts[i]}, "text": texts[i]}
def mixed(i): return {"image": torch.ones(3), "text": texts[i]}

if __name__ == "__main__":
    for name, function, compression in [
        ("plain", plain, {}), ("nested", nested, {}), ("mixed", mixed, {}),
        ("nested-zstd", nested, {"compression": "zstd"}),
        ("mixed-zstd", mixed, {"compression": "zstd"}),
        ("mixed-zstd-whole", mixed, {"compression": "zstd", "compression_level": "chunk"}),
    ]:
        optimize(function, list(range(len(texts))), f"{out}/{name}", chunk_size=40, num_workers=1, **compression)
    columns = {"text": "str", "id": "int", "body": "str", "raw": "bytes"}
    for name, compression in [("mds", None), ("mds-zstd", "zstd:7"), ("mds-gz", "gz")]:
        with MDSWriter(out=f"{out}/{name}", columns=columns, compression=compression, size_limit=8192) as writer:
            for i, text in enumerate(texts):
                writer.write({"text": text, "id": i, "body": text[::-1], "raw": b"raw"})
    print("{}")
"""
TEXTS = [f"Döküment {i}:" + " wörter und Wörter" * (i % 13) for i in range(100)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("peers")
    script = home / "write.py"
    script.write_text(WRITER)
    Peers(home).run(script, texts=TEXTS, out=str(home / "out"))
    return {path.name: path for path in (home / "out").iterdir()}


def source_of(pattern, **more):
    return SourceSettings(kind="files", files=(str(pattern),), **more)


def list_shards(folder):
    return [path for path in sorted(folder.iterdir()) if path.name != "index.json"]


def read(folder, **more):
    return [
        text for file in list_shards(folder) for text in read_texts(file, source_of(file, **more))
    ]


def copy_of(file, folder):
    """A copy of a shard, to be damaged, beside its index."""
    shutil.copy(file.with_name("index.json"), folder)
    return folder / file.name


@pytest.mark.parametrize(
    ("name", "column", "shards"),
    [
        *((name, "text", 4) for name in ("mds", "mds-zstd", "mds-gz")),
        *(
            (name, "text", 3)
            for name in ("plain", "nested", "nested-zstd", "mixed", "mixed-zstd-whole")
        ),
        ("nested", "doc.body", 3),
    ],
)
def test_the_texts_are_those_that_were_written(folders, name, column, shards):
    assert len(list_shards(folders[name])) >= shards
    assert read(folders[name], text_column=column) == TEXTS
    if name == "mds":
        pairs = read(folders[name], text_column="body", target_column="text")
        assert pairs == [f"{text[::-1]}␞{text}" for text in TEXTS]


@pytest.mark.parametrize(("name", "glob"), [("mds", "*.mds"), ("nested", "*.bin")])
def test_a_corpus_of_shards_is_the_corpus_of_parquet(folders, tmp_path, name, glob):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "texts.parquet")
    expected = build(
        CorpusSettings(name="own", source=source_of(tmp_path / "texts.parquet")), tmp_path / "p"
    )
    built = build(
        CorpusSettings(name="own", source=source_of(folders[name] / glob)), tmp_path / "c"
    )
    for split in ("train", "validation"):
        assert built["splits"][split]["text_sha256"] == expected["splits"][split]["text_sha256"]
    shards = [path.name for path in list_shards(folders[name])]
    assert [Path(file["name"]).name for file in built["source"]["files"]] == shards


def test_an_empty_shard_has_no_documents(folders, tmp_path):
    file = list_shards(folders["mds"])[0]
    config = file.read_bytes()[4 * (int.from_bytes(file.read_bytes()[:4], "little") + 2) :]
    config = config[: config.index(b"}") + 1]
    end = 8 + len(config)
    (tmp_path / "empty.mds").write_bytes(
        (0).to_bytes(4, "little") + end.to_bytes(4, "little") + config
    )
    assert has_documents(file, source_of(file))
    assert not has_documents(tmp_path / "empty.mds", source_of(tmp_path / "empty.mds"))


@pytest.mark.parametrize(
    ("name", "columns", "problem", "facts"),
    [
        (
            "mds",
            {"text_column": "tekst"},
            "has no column 'tekst'",
            {"next": "did you mean 'text'?"},
        ),
        ("mds", {"text_column": "id"}, "does not hold text in the column 'id'", {"found": "int"}),
        ("nested", {"text_column": "tekst"}, "has no column 'tekst'", {"has": "id, doc, text"}),
        (
            "nested",
            {"text_column": "id"},
            "does not hold text in the column 'id'",
            {"found": "int64"},
        ),
        (
            "mixed",
            {"text_column": "image"},
            "does not hold text .* 'image'",
            {"found": "no_header_tensor:1"},
        ),
        ("mixed-zstd", {}, "items are compressed", {}),
    ],
)
def test_a_wrong_column_or_kind_of_items(folders, name, columns, problem, facts):
    with pytest.raises(UserError, match=problem) as caught:
        read(folders[name], **columns)
    assert {key: caught.value.facts[key] for key in facts} == facts


@pytest.mark.parametrize(
    "name", ["mds", "mds-zstd", "mds-gz", "plain", "nested", "mixed", "mixed-zstd-whole"]
)
def test_a_file_that_breaks_off_is_one_error_and_a_changed_byte_gives_one_or_another_text(
    folders, tmp_path, name
):
    file = list_shards(folders[name])[0]
    data = file.read_bytes()
    copy = copy_of(file, tmp_path)
    for length in [*range(40), *range(40, len(data), max(1, len(data) // 97)), len(data) - 1]:
        copy.write_bytes(data[:length])
        with pytest.raises(UserError) as caught:
            list(read_texts(copy, source_of(copy)))
        assert str(copy) in str(caught.value.facts)
    for at in () if "-" in name else range(0, len(data), max(1, len(data) // 211)):
        copy.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        try:
            texts = list(read_texts(copy, source_of(copy)))
        except UserError as error:
            assert str(copy) in str(error.facts)
        else:
            assert all(isinstance(text, str) for text in texts if text is not None)


def test_a_litdata_chunk_needs_its_index(folders, tmp_path):
    copy = copy_of(list_shards(folders["plain"])[0], tmp_path)
    shutil.copy(folders["plain"] / copy.name, copy)
    (tmp_path / "index.json").write_text(
        json.dumps({"chunks": [], "config": {"data_format": ["str"]}})
    )
    with pytest.raises(UserError, match="does not have the expected content"):
        list(read_texts(copy, source_of(copy)))
    (tmp_path / "index.json").unlink()
    with pytest.raises(UserError) as caught:
        list(read_texts(copy, source_of(copy)))
    assert caught.value.facts["path"] == str(tmp_path / "index.json")
    assert caught.value.facts["next"] == f"put the folder's index.json next to {copy.name}"
