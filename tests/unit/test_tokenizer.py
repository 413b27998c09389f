"""Tokenizers: exact, deterministic, special-token text stays text, files held against their
hashes.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import HOSTILE, make_corpus, make_tokenizer
from tests.web import Server
from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings.data import TokenizerSettings

pytestmark = pytest.mark.slow(23)

TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(50)] + list(
    HOSTILE
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), TEXTS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, corpus):
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("bpe"), corpus, 320))


@pytest.fixture(scope="module")
def tekken(tekken_folder):
    return load_tokenizer(tekken_folder)


def test_training_twice_gives_the_same_file(tmp_path, corpus):
    a, b = (make_tokenizer(tmp_path / name, corpus, 400) for name in "ab")
    assert all(
        (a / name).read_bytes() == (b / name).read_bytes()
        for name in ("tokenizer.json", "manifest.json")
    )


@pytest.mark.parametrize("kind", ["bpe", "tekken"])
def test_text_comes_back_and_that_of_control_tokens_is_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    for text, ids in zip(HOSTILE, tokenizer.encode_batch(HOSTILE), strict=True):
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
    control = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    for ids in tokenizer.encode_batch(["<s>", "</s>", "a<pad>b", "[INST]", "<s></s>"]):
        assert len(ids) > 1 and not {*control} & set(ids.tolist())
    assert tokenizer.decode(control) == "<s></s><pad>" and len(tokenizer.encode_batch([""])[0]) == 0
    assert kind == "tekken" or (control, tokenizer.vocabulary_size) == ([0, 1, 2], 320)


@pytest.fixture(scope="module")
def reference():
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(
        Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    )


def test_tekken_has_mistral_commons_control_ids(tekken, reference):
    found = (tekken.bos_id, tekken.eos_id, tekken.pad_id, tekken.vocabulary_size)
    assert (
        found
        == (reference.bos_id, reference.eos_id, reference.pad_id, reference.n_words)
        == (1, 2, 11, 131_072)
    )


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"]), max_size=200)
    | st.sampled_from(HOSTILE)
)
@settings(max_examples=200)
def test_tekken_is_exactly_mistral_commons_on_assigned_characters(tekken, reference, text):
    """Whether a character of a newer Unicode is a letter follows each library's own table: `{A`
    behind U+323B0 (Unicode 17) is split in two ways.
    """
    assert tekken.encode_batch([text])[0].tolist() == reference.encode(text, bos=False, eos=False)


def test_loading_tekken_does_not_import_its_package(tekken_folder):
    code = (
        "import sys; from tokenscale.data.tokenizers.load import load_tokenizer; "
        "load_tokenizer(sys.argv[1]); "
    )
    code += "sys.exit('mistral_common' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, tekken_folder], check=True)


def test_a_changed_or_missing_tokenizer_and_one_to_train_on_nothing_are_refused(tmp_path, corpus):
    folder = make_tokenizer(tmp_path, corpus)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"version": "1.0"', '"version": "1.0" '))
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert {"file", "expected", "found", "next"} <= set(error.value.facts)
    with pytest.raises(UserError, match=f"snakemake -f {tmp_path}/none/manifest.json"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="--corpus"):
        build(
            TokenizerSettings(name="b", kind="bpe", corpus="tiny", vocabulary_size=300),
            tmp_path / "new",
        )


@pytest.fixture
def folder(tmp_path, bpe, corpus):
    """A folder as transformers writes it: a template that adds BOS, truncation and padding switched
    on.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(
        str(make_tokenizer(tmp_path / "made", corpus, 320) / "tokenizer.json")
    )
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    path = tmp_path / "folder"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_folder_is_read_with_its_own_control_tokens(tmp_path, folder, bpe):
    build(TokenizerSettings(name="hf", kind="huggingface", source=str(folder)), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocabulary_size) == (320, 321, 322)
    for ours, expected in zip(tokenizer.encode_batch(TEXTS), bpe.encode_batch(TEXTS), strict=True):
        assert np.array_equal(ours, expected)  # no template, no truncation, no padding
    assert 320 not in tokenizer.encode_batch(["a <|begin|> b"])[0]


def test_the_settings_go_before_the_folders_files(tmp_path, folder):
    settings = TokenizerSettings(
        name="hf", kind="huggingface", source=str(folder), bos="<s>", eos="</s>"
    )
    manifest = build(settings, tmp_path / "out")
    assert (manifest["bos_id"], manifest["eos_id"]) == (0, 1)
    with pytest.raises(UserError, match="not in the vocabulary"):
        build(replace(settings, bos="<nope>"), tmp_path / "none")


def test_a_tokenizer_without_bos_says_to_set_one(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="`bos`"):
        build(
            TokenizerSettings(name="hf", kind="huggingface", source=str(tmp_path)), tmp_path / "out"
        )


def test_a_hub_that_does_not_answer_is_a_users_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    settings = TokenizerSettings(name="hf", kind="huggingface", source="nobody/nothing")
    for revision, what in (("a" * 40, "no route to host"), (None, "pinned revision")):
        with pytest.raises(UserError, match=what):
            build(replace(settings, revision=revision), tmp_path / "out")


def test_a_tokenizer_of_the_hub_is_read_through_its_client_with_what_its_files_name(tmp_path):
    """In a process of its own: the client reads its environment when it is imported."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    made = make_tokenizer(tmp_path / "bpe", make_corpus(tmp_path / "c", ["one two three"] * 3))
    named = json.dumps({"bos_token": {"content": "</s>"}, "eos_token": "<pad>"}).encode()
    stated = {"name": "hf", "kind": "huggingface", "source": "people/words", "revision": commit}
    command = [
        sys.executable,
        "-m",
        "tokenscale",
        "tokenizer",
        "--settings",
        json.dumps(stated),
        "--output",
    ]
    with Server() as web:
        hub = f"/people/words/resolve/{commit}"
        web.files[f"{hub}/tokenizer.json"] = (made / "tokenizer.json").read_bytes()
        web.files[f"{hub}/tokenizer_config.json"] = named
        environment = {
            "HF_ENDPOINT": web.address,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": "1",
        }
        for folder, offline in (("a", "0"), ("b", "1")):  # the second time from the client's cache
            environment = os.environ | environment | {"HF_HUB_OFFLINE": offline}
            subprocess.run(
                [*command, str(tmp_path / folder / "manifest.json")],
                env=environment,
                check=True,
                timeout=60,
            )
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert (manifest["bos_id"], manifest["eos_id"], manifest["revision"]) == (1, 2, commit)
    assert (tmp_path / "b/manifest.json").read_bytes() == (
        tmp_path / "a/manifest.json"
    ).read_bytes()
