"""Stores that `convert` made of tokens from elsewhere: trained on by their ids, whoever's tokenizer
made them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import Lab, make_corpus, make_tokenizer
from tests.unit.study_train.conftest import TEXTS, asked, prepared
from tokenscale.base.errors import UserError
from tokenscale.cli.convert import ConvertSettings, convert
from tokenscale.cli.main import main
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.run import RunSettings

IDS = {"vocabulary_size": 300, "bos_id": 0, "eos_id": 1}
DOCUMENTS = [[2 + (7 * n + k) % 298 for k in range(3 + n % 40)] for n in range(50)]


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A nanoGPT file in a folder to work in; the tokenizer that made it is not there."""
    np.concatenate([np.array([*d, 1], "<u2") for d in DOCUMENTS]).tofile(tmp_path / "train.bin")
    monkeypatch.chdir(tmp_path)
    return Path("train.bin")


def made(source, target, to, **settings):
    convert(
        ConvertSettings(to=to, **settings),
        source,
        Path(target),
        lambda line: None,
        "tokenscale convert …",
    )
    return target


@pytest.mark.parametrize(
    "target, to, approach",
    [
        ("mine", "packed-sequence_length=32-packing=concatenate", "packed"),
        ("mine", "token-list", "token-list"),
        ("mine.parquet", "padded-sequence_length=32", "pretokenized-padded"),
    ],
)
def test_ids_of_an_unknown_tokenizer_are_trained_on(foreign, target, to, approach):
    made(foreign, target, to, **IDS)
    job = prepared(
        "--dataset", target, "--pretokenized", "--sequence-length", "32", "--training-steps", "2"
    )
    assert job.run.approach == approach and job.run.tokenizer.kind == "unknown"
    run = RunSettings.from_json(job.run.to_json())  # as a rank gets it
    batches = open_batches(run, Inputs(store=job.manifests["store"]))
    steps = range(2 * int(batches.rows_per_epoch()) // run.global_batch + 1)
    found = {
        label for _ in steps for label in batches.next().labels_bt.flatten().tolist() if label >= 0
    }
    assert batches.vocabulary_size == 300 and found == {
        i for document in DOCUMENTS for i in document[: 2 * 32]
    }


def test_an_unknown_tokenizer_can_be_named(foreign):
    made(foreign, "mine", "packed-sequence_length=32", **IDS)
    words = [
        "--dataset",
        "mine",
        "--pretokenized",
        "--sequence-length",
        "32",
        "--training-steps",
        "2",
    ]
    (note,) = asked(*words).notes
    assert "unknown" in note and "--tokenizer-name FOLDER" in note and "generate" in note
    identity = asked(*words).run.identity
    corpus = make_corpus(Path("corpus"), TEXTS)
    for name, size in (("right", 300), ("wrong", 290)):
        make_tokenizer(Path(name), corpus, size)
    job = prepared(*words, "--tokenizer-name", "right")
    assert (
        job.manifests["tokenizer"] == Path("right/manifest.json") and job.run.identity == identity
    )
    with pytest.raises(UserError, match="not the one that made these ids") as refused:
        asked(*words, "--tokenizer-name", "wrong")
    assert "290" in refused.value.facts["tokenizer"] and "300" in refused.value.facts["store"]


def test_a_folder_without_a_token_store_is_refused(foreign, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text(json.dumps({"schema_version": 1, "kind": "bpe"}))
    with pytest.raises(UserError, match="the dataset's folder holds no token store"):
        asked("--dataset", "other", "--pretokenized")


def test_a_converted_store_that_has_changed_names_the_command_that_made_it(foreign, capsys):
    words = [
        "convert",
        "train.bin",
        "mine",
        "--to",
        "packed-sequence_length=32",
        "--vocabulary-size",
        "300",
        "--bos-id",
        "0",
        "--eos-id",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tokenscale", *words])
        assert main(words) == 0
    before = Path("mine/tokens.bin").read_bytes()
    Path("mine/tokens.bin").write_bytes(before[:-1])
    with pytest.raises(UserError) as error:
        prepared("--dataset", "mine", "--pretokenized", "--training-steps", "2")
    command = error.value.facts["next"].split()
    assert command == ["tokenscale", *words, "--force"]
    assert main(command[1:]) == 0 and Path("mine/tokens.bin").read_bytes() == before


def test_a_store_of_a_rule_is_made_again_by_the_rule(tmp_path):
    lab = Lab(tmp_path, TEXTS[:20])
    store = lab.store(StoreSettings("packed", sequence_length=32))
    (store / "rows.npy").unlink()
    with pytest.raises(UserError) as error:
        prepared("--dataset", str(store), "--pretokenized", "--training-steps", "2")
    assert error.value.facts["next"] == f"snakemake -f {store}/manifest.json"


def test_nothing_makes_a_tokenizer_that_is_unknown(here):
    path = Path("config/config.yaml")
    odd = '"odd": {"kind": "unknown", "vocabulary_size": 300}'
    path.write_text(path.read_text().replace('"tekken": {"kind": "tekken"}', odd))
    with pytest.raises(UserError, match="unknown tokenizer kind 'unknown'"):
        asked("--dataset", "tinystories", "--tokenizer-name", "tekken")
