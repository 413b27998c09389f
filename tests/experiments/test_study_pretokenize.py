"""A file of text → files of tokens, in the studies' words: row for row what tokenizing while
training gives.
"""

import gzip
import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import (
    HOSTILE,
    make_corpus,
    make_run,
    make_store,
    make_tokenizer,
    same,
    texts_around,
)
from tests.refusals import refused
from tests.unit.study_train.conftest import files
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.parquet import PaddedStore
from tokenscale.data.stores.text import TextDocuments
from tokenscale.data.tokenizers.huggingface import resolve_tokenizer
from tokenscale.settings.data import StorageSettings, StoreSettings, TokenizerSettings

pytestmark = pytest.mark.experiment

T = 16
TEXTS = [*HOSTILE, *texts_around(T), *HOSTILE]  # duplicates stay


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files of the same texts, the corpus that they would be, and a small tokenizer."""
    root = tmp_path_factory.mktemp("place")
    pq.write_table(
        pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))}), root / "train_data.parquet"
    )
    (root / "lines.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in TEXTS))
    make_corpus(root / "corpus", TEXTS)
    make_tokenizer(root / "results/tokenizers/bpe", root / "corpus", 262)
    return root


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A working folder with copies of these files, and nothing written yet."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def command(*arguments, path="train_data.parquet", output="out"):
    common = [
        "--input-path",
        path,
        "--output-dir",
        output,
        "--tokenizer-name",
        "bpe",
        "--max-length",
        str(T),
    ]
    return ["pretokenize", *common, *arguments]


def pretokenize(*arguments, **places):
    return main(command(*arguments, **places))


def test_the_studies_command_makes_one_file_a_format(here, monkeypatch, tekken_folder):
    """As in their README, name of the tokenizer and all. Tekken is built beside the tokens: here,
    copied.
    """
    built = []
    build = "tokenscale.cli.pretokenize_file.build_tokenizer"
    monkeypatch.setattr(
        build,
        lambda settings, directory: (
            built.append(settings),
            shutil.copytree(tekken_folder, directory),
        ),
    )
    words = (
        "--tokenizer-name unsloth/Mistral-Nemo-Base-2407-bnb-4bit --max-length 32 --batch-size "
        "100 --format padded"
    )
    assert pretokenize(*words.split(), "token-list") == 0
    assert built == [TokenizerSettings(name="tekken", kind="tekken")]
    stems = [f"train_data_tokenized_{form}_snappy" for form in ("padded", "token-list")]
    names = {
        f"{s}.{e}" for s in stems for e in ("parquet", "records", "manifest.json", "build.json")
    }
    assert {p.name for p in (here / "out").iterdir()} == {*names, "tokenizers"}
    manifest = json.loads((here / f"out/{stems[0]}.manifest.json").read_text())
    assert manifest["tokenizer"]["kind"] == "tekken" and manifest["vocabulary_size"] == 131_072
    assert resolve_tokenizer("out/tokenizers/tekken").settings.kind == "tekken"
    column = pq.ParquetFile(here / f"out/{stems[0]}.parquet").metadata.row_group(0).column(0)
    assert column.compression == "SNAPPY" and column.physical_type == "INT32"


@pytest.mark.parametrize(
    "path, extra", [("train_data.parquet", []), ("lines.jsonl", ["--text-column", "body"])]
)
def test_rows_are_bit_for_bit_those_tokenized_while_training(here, path, extra):
    assert pretokenize(*extra, path=path, output="out") == 0
    storage = StorageSettings(codec="snappy")
    stem = Path(path).stem
    for online, offline, form in (
        ("padded", "pretokenized-padded", "padded"),
        ("padding-free", *["token-list"] * 2),
    ):
        run = replace(make_run(online, T), global_batch=5)
        manifest = here / f"out/{stem}_tokenized_{form}_snappy.manifest.json"
        corpus, tokenizer = here / "corpus", here / "results/tokenizers/bpe"
        lengths = make_store(here / "tokens", corpus, tokenizer, run.store) if run.store else None
        a = open_batches(run, Inputs(corpus, tokenizer, lengths))
        b = open_batches(replace(run, approach=offline, storage=storage), Inputs(store=manifest))
        assert all(same(a.next(), b.next()) for _ in range(3 * len(TEXTS) // 5))


def test_a_rebuild_gives_the_same_bytes_and_the_manifest_names_no_place(here):
    assert pretokenize() == 0
    before = files(here / "out")
    shutil.move(here / "train_data.parquet", here / "corpus/train_data.parquet")
    assert pretokenize(path="corpus/train_data.parquet", output="again") == 0
    assert pretokenize(path="corpus/train_data.parquet") == 0, "over its own files"
    for after in (files(here / "out"), files(here / "again")):
        assert after.keys() == before.keys()
        assert all(
            after[name] == before[name] for name in before if not name.endswith("build.json")
        )
    texts = [
        text.decode() for name, text in before.items() if name.endswith("snappy.manifest.json")
    ]
    assert len(texts) == 2
    assert not [
        word for word in ("here", platform.node(), "unix", "corpus/") if word in "".join(texts)
    ]


def test_documents_a_call_and_rows_a_group_change_no_id(here, monkeypatch):
    assert pretokenize() == 0
    sizes = []
    encode = TextDocuments._encode
    monkeypatch.setattr(
        TextDocuments, "_encode", lambda d, texts: sizes.append(len(texts)) or encode(d, texts)
    )
    assert pretokenize("--batch-size", "7", "--row-group-rows", "3", output="other") == 0
    assert max(sizes) == 7 and sum(sizes) == 2 * len(TEXTS), (
        "the tokenizer gets as many as asked for"
    )
    for form in ("padded", "token-list"):
        files = [
            here / folder / f"train_data_tokenized_{form}_snappy.parquet"
            for folder in ("out", "other")
        ]
        assert pq.read_table(files[0]).equals(pq.read_table(files[1]))
        assert pq.ParquetFile(files[1]).num_row_groups == -(-len(TEXTS) // 3)


def test_a_named_file_is_not_cut_into_shards(here, monkeypatch):
    monkeypatch.setattr("tokenscale.data.stores.write_parquet.SHARD_ROWS", 4)
    assert (
        pretokenize(
            "--compression", "zstd", "--compression-level", "9", "--dtype", "int64", "--eos"
        )
        == 0
    )
    file = pq.ParquetFile(here / "out/train_data_tokenized_token-list_zstd.parquet")
    assert file.metadata.num_rows == len(TEXTS)
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "ZSTD" and column.physical_type == "INT64"
    assert all(row[-1] == 1 for row in file.read().column("tokens").to_pylist())


def test_text_is_cut_at_a_separator_and_null_is_no_document(here, capsys):
    with gzip.open("stories.txt.gz", "wt") as file:
        file.write("one<|endoftext|>two<|endoftext|>three")
    assert (
        pretokenize("--separator", "<|endoftext|>", "--format", "padded", path="stories.txt.gz")
        == 0
    )
    assert pq.read_metadata(here / "out/stories_tokenized_padded_snappy.parquet").num_rows == 3
    pq.write_table(pa.table({"text": ["a", None, "b"]}), "nulls.parquet")
    capsys.readouterr()
    assert pretokenize("--format", "padded", path="nulls.parquet") == 0
    assert "1 of 3 rows hold no text and are skipped" in capsys.readouterr().out


def test_the_folder_of_a_fast_tokenizer_will_do(here):
    """Its file is copied beside the tokens, under a name that holds its hash."""
    shutil.copytree(
        "results/tokenizers/bpe", "plain", ignore=lambda *_, **__: ["manifest.json", "build.json"]
    )
    assert pretokenize("--format", "padded", "--tokenizer-name", "plain") == 0
    (folder,) = (here / "out/tokenizers").iterdir()
    assert folder.name.startswith("plain-") and (folder / "tokenizer.json").is_file()
    manifest = json.loads(
        (here / "out/train_data_tokenized_padded_snappy.manifest.json").read_text()
    )
    assert (
        manifest["tokenizer"]["kind"] == "huggingface"
        and manifest["tokenizer"]["name"] == folder.name
    )


# --------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    "arguments, path, sentences",
    [
        (
            ["--text-column", "txt"],
            "train_data.parquet",
            ["no column 'txt'", "--text-column", "mean 'text'"],
        ),
        ([], "none.parquet", ["holds no documents"]),
        (
            ["--format", "padded", "packed"],
            "train_data.parquet",
            ["cannot be a Parquet file", "snakemake"],
        ),
        (["--compression-level", "3"], "train_data.parquet", ["snappy has no level"]),
        (["--tokenizer-name", "a/b"], "train_data.parquet", ["a/b@COMMIT"]),
        (
            ["--tokenizer-name", "corpus"],
            "train_data.parquet",
            ["neither tokenizer.json nor a manifest"],
        ),
        (["--store", "padded"], "train_data.parquet", ["two modes", "--store"]),
        (["--max-length", "9"], None, ["--input-path is missing"]),
        (["--store", "padded"], None, ["--corpus is missing"]),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(here, capsys, arguments, path, sentences):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), "none.parquet")
    message = refused(
        capsys, command(*arguments, path=path) if path else ["pretokenize", *arguments], here
    )
    assert all(sentence in message for sentence in sentences), message


def test_files_of_other_settings_or_origin_are_not_written_over(here, capsys):
    assert pretokenize() == 0
    (here / "out/mine.parquet").write_bytes(b"x")
    for arguments, words in ((["--max-length", "32"], "sequence_length 32"), (["--eos"], "eos")):
        message = refused(capsys, command(*arguments), here)
        assert "other settings" in message and words in message
    stem = here / "out/train_data_tokenized_padded_snappy"
    stem.with_suffix(".manifest.json").unlink()
    assert "has no manifest" in refused(capsys, command())
    stem.with_suffix(".parquet").unlink()
    assert f"{stem.name}.records" in refused(capsys, command())


def test_a_failure_half_way_keeps_the_old_files(here, monkeypatch):
    assert pretokenize() == 0
    before = files(here)

    def full(*_, **columns):
        raise OSError("disk")

    monkeypatch.setattr("tokenscale.data.stores.write_parquet.Shard.add", full)
    with pytest.raises(OSError, match="disk"):
        pretokenize()
    assert files(here) == before


def test_a_changed_file_is_found_and_its_command_named(here):
    assert pretokenize() == 0
    path = here / "out/train_data_tokenized_padded_snappy.records"
    data = bytearray(path.read_bytes())
    data[len(data) // 10] ^= 1
    path.write_bytes(data)
    manifest = path.with_name(f"{path.stem}.manifest.json")
    store = StoreSettings("padded", "train", T, codec="snappy")
    with pytest.raises(UserError, match="has changed") as error:
        PaddedStore(manifest, open_store(manifest, store)).rows(np.arange(len(TEXTS)))
    command = error.value.facts["next"]
    assert command.startswith(
        "tokenscale pretokenize --input-path train_data.parquet --output-dir out"
    )
    assert main(command.split()[1:]) == 0
    PaddedStore(manifest, open_store(manifest, store)).rows(np.arange(len(TEXTS)))
