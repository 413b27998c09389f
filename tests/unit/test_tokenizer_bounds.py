"""Foreign tokenizers that state what no tokenizer needs: one message with the file, at once."""

import json
import os
import subprocess
import sys

import pytest

from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.load import build
from tokenscale.settings.data import TokenizerSettings

VOCABULARY = {"<s>": 0, "a": 1, "b": 2, "ab": 3}
BACKTRACKS = {"Regex": "(([a-z ])+.)+[A-Z]([a-z ])+$"}


def write(folder, *, vocabulary=VOCABULARY, **parts):
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "unk_token": "<s>"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(whole | parts))
    return TokenizerSettings(name="own", kind="huggingface", source=str(folder), bos="<s>")


def replace(pattern, content):
    return {"normalizer": {"type": "Replace", "pattern": pattern, "content": content}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"vocabulary": VOCABULARY | {"ab": 10**9}}, "the id 1,000,000,000"),
        ({"vocabulary": VOCABULARY | {"ab": 2**16}}, "the id 65,536"),
        ({"vocabulary": VOCABULARY | {"ab": 2**32}}, "expected u32"),
        ({"vocabulary": VOCABULARY | {"ab": -1}}, "expected u32"),
        ({"vocabulary": VOCABULARY | {"ab": 1.5}}, "expected u32"),
        ({"vocabulary": VOCABULARY | {"ab": 2}}, "the id 2 of two entries"),
        (replace({"String": " "}, " " * 10**5), "characters of 95"),
    ],
)
def test_values_that_no_tokenizer_needs_are_refused_before_arrays_are_made(parts, words, tmp_path):
    settings = write(tmp_path / "t", **parts)
    with pytest.raises(UserError) as caught:
        build(settings, tmp_path / "made")
    assert words in str(caught.value)
    assert caught.value.facts["file"] == str(tmp_path / "t/tokenizer.json")


def test_a_vocabulary_with_a_gap_is_taken(tmp_path):
    settings = write(tmp_path / "t", vocabulary=VOCABULARY | {"ab": 2**16 - 1})
    assert build(settings, tmp_path / "made")["vocabulary_size"] == 2**16


CODE = """
import sys
from pathlib import Path
from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers.load import build
from tokenscale.settings.data import TokenizerSettings
settings = TokenizerSettings(name="own", kind="huggingface", source=sys.argv[1], bos="<s>")
try:
    build(settings, Path(sys.argv[2]))
except UserError as error:
    print(error)
"""


def test_a_pattern_that_backtracks_for_ever_is_one_message(tmp_path):
    """The library panics at its limit, a stack for each text."""
    split = {"type": "Split", "pattern": BACKTRACKS, "behavior": "Isolated", "invert": False}
    write(tmp_path / "t", pre_tokenizer=split)
    variables = {name: value for name, value in os.environ.items() if name != "RUST_BACKTRACE"}
    argv = [sys.executable, "-c", CODE, tmp_path / "t", tmp_path / "made"]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, env=variables)
    assert "breaks off with the tokenizer's file" in done.stdout, done.stderr[-2000:]
    assert "retry-limit" in done.stdout and "t/tokenizer.json" not in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 5_000


def test_an_interrupt_is_no_panic():
    with pytest.raises(KeyboardInterrupt), backends.catch_panics():
        raise KeyboardInterrupt
