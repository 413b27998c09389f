"""The folder that `train` is tried in, and what its flags become there."""

import argparse
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import make_corpus, make_tokenizer
from tokenscale.cli.main import main
from tokenscale.cli.train import command as train
from tokenscale.cli.train.inputs import PreparedRun, prepare
from tokenscale.cli.train.request import Request, parse_request

TEXTS = [f"document number {i} has some words, {'and more ' * (i % 17)}" for i in range(120)]
CONFIG = {
    "experiments": [],
    "corpora": {"tinystories": {"source": {"files": "stories.txt", "separator": "<|endoftext|>"}}},
    "tokenizers": {
        "own": {"kind": "bpe", "corpus": "tinystories", "vocabulary_size": 280},
        "tekken": {"kind": "tekken"},
    },
    "mixtures": {"stories_only": {"weights": {"tinystories": 1}}},
}
PRESET = """\
model: {vocab_size: 300, hidden_size: 32, num_layers: 2, num_heads: 2, max_seq_len: 32}
training: {batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 6e-4, max_steps: 20, warmup_steps: 4}
distributed: {backend: gloo, mixed_precision: no}
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A project folder: text in three shapes, a configuration, a small tokenizer, and pretokenized
    files.
    """
    root = tmp_path_factory.mktemp("place")
    pq.write_table(pa.table({"text": TEXTS}), root / "web.parquet")
    (root / "stories.txt").write_text("<|endoftext|>".join(TEXTS))
    (root / "book.txt").write_text(" ".join(TEXTS))
    (root / "config").mkdir()
    (root / "config/config.yaml").write_text(json.dumps(CONFIG))
    (root / "preset.yaml").write_text(PRESET)
    make_tokenizer(root / "results/tokenizers/bpe", make_corpus(root / "corpus", TEXTS), 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        arguments = [
            "--input-path",
            "web.parquet",
            "--output-dir",
            "out",
            "--tokenizer-name",
            "bpe",
        ]
        assert main(["pretokenize", *arguments, "--max-length", "32", "--dtype", "int64"]) == 0
    return root


@pytest.fixture
def shared(place, monkeypatch):
    """These files themselves, to work in without changing them."""
    monkeypatch.chdir(place)
    for name in ("RANK", "WORLD_SIZE"):  # or `train` takes the test for a rank of torchrun's
        monkeypatch.delenv(name, raising=False)
    return place


@pytest.fixture
def here(shared, place, tmp_path, monkeypatch):
    """A working folder with copies of these files."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def asked(*arguments: str, world_size: int | None = None) -> Request:
    """What flags ask for; `world_size` as torchrun says it."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parse_request(parser.parse_args(arguments), world_size)


def prepared(*arguments: str) -> PreparedRun:
    """The same with its inputs made."""
    return prepare(asked(*arguments), lambda line: None)


def files(folder):
    """Path → content of every file below a folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


PADDED = "out/web_tokenized_padded_snappy.parquet"
LISTS = "out/web_tokenized_token-list_snappy.parquet"
