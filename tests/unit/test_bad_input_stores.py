"""Damaged corpora, tokenizers, stores and checkpoints: refused, or read as if nothing were; never
another content.
"""

import functools
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_intdigest

from tests.corpora import texts_of
from tests.harm import edited, harmed
from tests.unit.test_formats import read_all
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    read_json,
    sha256_file,
    sha256_text,
    write_json,
    write_sealed,
)
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.records import write_records
from tokenscale.data.stores.manifest import SEAL, open_records, open_store, read_store_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings.data import StoreSettings, TokenizerSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import (
    RESUME,
    Checkpoint,
    Piece,
    State,
    _fingerprint,
    commit,
    read_model,
    write_rank,
)
from tokenscale.train.checkpoint_models import check_weights

T = 16
STORES = [
    StoreSettings("padded", sequence_length=T),
    StoreSettings("padded", sequence_length=T, codec="none", dtype="int64"),
    StoreSettings("token-list"),
    StoreSettings("packed", sequence_length=T),
    StoreSettings("packed", sequence_length=T, packing="concatenate"),
]


def write_tiny_checkpoint(folder):
    for rank in range(2):
        pieces = {"model.a": Piece(torch.arange(12.0).reshape(3, 4), (3 * rank, 0), (6, 4))}
        pieces[f"model.b{rank}"] = Piece.of(torch.full((5,), float(rank)))
        write_rank(folder, rank, State(pieces))
    facts = {
        "kind": "resume",
        "run_id": "tiny",
        "run": to_dict(RunSettings()),
        "model": to_dict(ModelSettings()),
    }
    counts = {
        "step": 1,
        "begins_at": 0,
        "begins_at_useful_tokens": 0,
        "best_validation_loss": None,
        "loss_scale": {},
    }
    commit(
        folder, 2, facts | counts | {"budget": {"useful_tokens": 9, "seconds": 0.5, "warm": 0.1}}
    )
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "step=00000001")


def all_of(folder):
    shape, weights = read_model(folder)
    found = Checkpoint(folder)
    part = found.part("model.a", (2, 1), (2, 2))
    return (
        shape,
        {name: tensor.tolist() for name, tensor in weights.items()},
        part.tolist(),
    )


def ids_of(folder):
    tokenizer = load_tokenizer(folder, "tokenizers")
    return [
        *(a.tolist() for a in tokenizer.encode(["some wörds", "<s>"])),
        tokenizer.bos_id,
        tokenizer.pad_id,
    ]


#: folder → how it is read, number of damaged copies, how many are refused at least: damage to
#: build.json does no harm
DAMAGED = {
    store.directory: (functools.partial(read_all, store=store), 201, 100) for store in STORES
}
DAMAGED |= {
    "corpus": (texts_of, 150, 70),
    "tokenizer": (ids_of, 100, 50),
    "step=00000001": (all_of, 200, 150),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_no_damaged_folder_is_read_as_something_else(lab, checkpoint, tmp_path, name):
    read, harms, least = DAMAGED[name]
    others = {"corpus": lab.corpus, "tokenizer": lab.tokenizer, checkpoint.name: checkpoint}
    source = others.get(name) or lab.store(StoreSettings.parse(name))
    good = read(source)
    draw = random.Random(name)
    refused = 0
    for _ in range(harms):
        what = harmed(source, tmp_path / name, draw)
        try:
            assert read(tmp_path / name) == good, what
        except UserError as error:
            assert str(tmp_path / name) in str(error) and "next" in error.facts, what
            refused += 1
    assert refused > least


def write_rank_hash(folder):
    record = read_json(folder / "checkpoint.json")
    record["ranks"]["rank=00000.json"] = _fingerprint(folder / "rank=00000.json")
    write_sealed(folder / "checkpoint.json", record)


#: what is changed, how, what the message says
CONTRADICTIONS = [
    (
        "json",
        lambda index: index["model.a"].update(offsets=[1, 0]),
        "do not make up the tensor once",
    ),
    ("json", lambda index: index["model.a"].update(offsets=[9, 0]), "its index says"),
    ("json", lambda index: index["model.b0"].update(whole=[6]), "do not make up the tensor once"),
    (
        "json",
        lambda index: index["model.b0"].update(whole=[5, 1], offsets=[0, 0]),
        "its index says",
    ),
    ("json", lambda index: index["model.b0"].update(dtype="int64"), "its index says int64"),
    ("json", lambda index: index.update({"model.c": index.pop("model.b0")}), "differ in model.b0"),
    ("safetensors", lambda tensors: tensors.pop("model.b0"), "differ in model.b0"),
    (
        "safetensors",
        lambda tensors: tensors.update({"model.b0": torch.zeros(4)}),
        "do not make up the tensor once",
    ),
    (
        "safetensors",
        lambda tensors: tensors.update({"model.b0": torch.zeros(5, 2)}),
        "its index says",
    ),
    ("safetensors", lambda tensors: tensors.update({"model.b0": torch.zeros(5).half()}), "float16"),
    ("safetensors", lambda tensors: tensors["model.b0"].fill_(float("nan")), "not finite"),
]


@pytest.mark.parametrize("name, change, told", CONTRADICTIONS)
def test_an_index_and_tensors_that_contradict_each_other_are_one_message(
    checkpoint, tmp_path, name, change, told
):
    """Of a copy with a changed index of a rank, or changed tensors, and hashes that fit."""
    folder = shutil.copytree(checkpoint, tmp_path / "step=00000001")
    path = folder / "rank=00000.json"
    record = read_json(path)
    if name == "json":
        change(record["index"])
    else:
        tensors = load_file(path.with_suffix(".safetensors"))
        change(tensors)
        save_file(tensors, path.with_suffix(".safetensors"))
        record |= _fingerprint(path.with_suffix(".safetensors"))
    write_json(path, record)
    write_rank_hash(folder)
    with pytest.raises(UserError, match=told) as error:
        read_model(folder)
    assert "next" in error.value.facts


def test_weights_of_another_model_than_the_record_s_are_one_message(tmp_path):
    model = torch.nn.Linear(3, 2)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    check_weights(tmp_path, model, weights)
    for other in ({"weight": weights["weight"]}, {**weights, "bias": torch.zeros(3)}):
        with pytest.raises(UserError, match="not those of the model") as error:
            check_weights(tmp_path, model, other)
        assert error.value.facts["tensor"] == "bias"


@pytest.mark.parametrize("field", [name for name in RESUME if name != "ranks"])
@pytest.mark.parametrize("value", ["gone", [], True])
def test_a_resume_state_lacks_nothing_that_is_read_later(checkpoint, tmp_path, field, value):
    folder = shutil.copytree(checkpoint, tmp_path / "step=00000001")
    record = read_json(folder / "checkpoint.json") | {field: value}
    write_sealed(folder / "checkpoint.json", {k: v for k, v in record.items() if v != "gone"})
    if field == "begins_at_useful_tokens" and value == "gone":  # earlier code wrote none
        Checkpoint(folder)
        return
    with pytest.raises(UserError, match="does not have the expected content") as error:
        Checkpoint(folder)
    assert field in error.value.facts["reason"] and error.value.facts["file"] == str(
        folder / "checkpoint.json"
    )


@pytest.mark.parametrize("whose", ["corpus", "tokenizer", "checkpoint"])
def test_a_record_that_is_edited_and_hashed_anew_is_refused_or_read(
    lab, checkpoint, tmp_path, whose
):
    read = {"corpus": texts_of, "tokenizer": ids_of, "checkpoint": all_of}[whose]
    source = checkpoint if whose == "checkpoint" else getattr(lab, whose)
    folder = tmp_path / source.name
    draw = random.Random(4)
    refused = 0
    for _ in range(100):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        name = (
            draw.choice(["checkpoint.json", "rank=00000.json"])
            if whose == "checkpoint"
            else "manifest.json"
        )
        record = edited(read_json(folder / name), draw)
        (write_sealed if whose == "checkpoint" and isinstance(record, dict) else write_json)(
            folder / name, record
        )
        if name == "manifest.json":
            build = read_json(folder / "build.json") | {
                "manifest_sha256": sha256_text(canonical_json(record))
            }
            write_json(folder / "build.json", build)
        elif name != "checkpoint.json":
            write_rank_hash(folder)
        try:
            read(folder)
        except UserError as error:
            assert "next" in error.facts
            refused += 1
    assert refused > 20
    if whose != "checkpoint":  # and one that is not hashed anew
        shutil.copytree(source, folder, dirs_exist_ok=True)
        write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"note": "x"})
        with pytest.raises(UserError, match="has changed"):
            read(folder)


@pytest.mark.parametrize("wrong", [262, 5000, -1])
@pytest.mark.parametrize("store", STORES, ids=lambda s: s.directory)
def test_ids_outside_of_the_vocabulary_are_refused_though_their_hashes_fit(
    lab, tmp_path, store, wrong
):
    folder = shutil.copytree(lab.store(store), tmp_path / store.directory)
    manifest = read_store_manifest(folder)
    if store.format in ("padded", "token-list"):
        records = open_records(folder, manifest)
        documents = [records.read(i) for i in range(len(records))]
        documents[-1][-1] = np.array(wrong).astype("<u2")
        values = np.concatenate(documents), records.lengths()
        manifest["records"]["files"] = [
            write_records(folder / "shard-00000.bin", [values], np.dtype("<u2"))
        ]
    else:
        rows = np.fromfile(folder / "tokens.bin", dtype="<u2").reshape(-1, T + 1)
        rows[3, 5] = np.array(wrong).astype("<u2")
        checksums = np.load(folder / "checksums.npy")
        checksums[3] = xxh3_64_intdigest(rows[3])
        np.save(folder / "checksums.npy", checksums)
        (folder / "tokens.bin").write_bytes(rows.tobytes())
    for file in manifest["files"]:
        file |= {
            "bytes": (folder / file["name"]).stat().st_size,
            "sha256": sha256_file(folder / file["name"]),
        }
    write_sealed(folder / "manifest.json", manifest, SEAL)
    with pytest.raises(UserError, match="outside of its vocabulary") as error:
        read_all(folder, store)
    assert "262" in error.value.facts["expected"] and str(folder) in error.value.facts["file"]


def records_of(lab, checkpoint):
    """(folder, file of its record, key of the version, who reads it, where it names a file)"""
    of_manifest = ("manifest.json", "schema_version")
    open_packed = functools.partial(open_store, expected=STORES[3])
    yield lab.corpus, *of_manifest, read_corpus_manifest, lambda m: m["splits"]["train"]["files"][0]
    yield lab.tokenizer, *of_manifest, read_tokenizer_manifest, lambda m: m["file"]
    yield lab.store(STORES[3]), *of_manifest, open_packed, lambda m: m["files"][0]
    yield checkpoint, "checkpoint.json", "schema", Checkpoint, None


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "", "a\0b", None, 5])
def test_a_manifest_that_names_files_elsewhere_is_refused(lab, checkpoint, tmp_path, name):
    for source, file, _, read, file_of in list(records_of(lab, checkpoint))[:3]:
        folder = shutil.copytree(source, tmp_path / source.name)
        (folder / "build.json").unlink()
        manifest = read_json(folder / file)
        file_of(manifest)["name"] = name
        if SEAL in manifest:
            write_sealed(folder / file, manifest, SEAL)
        else:
            write_json(folder / file, manifest)
        with pytest.raises(UserError, match="does not have the expected content") as error:
            read(folder)
        assert str(folder / file) == error.value.facts["file"]


@pytest.mark.parametrize("version", [99, 10**30, "2", None, -1, 1.5, [2]])
def test_whatever_has_another_version_is_refused(lab, checkpoint, tmp_path, version):
    for source, file, key, read, _ in records_of(lab, checkpoint):
        folder = shutil.copytree(source, tmp_path / source.name)
        (folder / "build.json").unlink(missing_ok=True)
        write_json(folder / file, read_json(folder / file) | {key: version})
        with pytest.raises(UserError) as error:
            read(folder)
        assert str(folder) in str(error.value) and "next" in error.value.facts


NO_TOKENIZERS = [
    b"",
    b'{"version": "1.0", "model": {',
    b"[1, 2]",
    b'{"version": "1.0"}',
    b'{"version": "\xff"}',
]
NO_TOKENIZERS += [b"[" * 100_000, b'{"version": "1.0", "model": {"type": "None"}}']


@pytest.mark.parametrize("content", NO_TOKENIZERS, ids=range(len(NO_TOKENIZERS)))
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/tokenizer.json").write_bytes(content)
    settings = TokenizerSettings(
        name="x", kind="huggingface", source=str(tmp_path / "theirs"), bos="<s>"
    )
    with pytest.raises(UserError, match=str(tmp_path / "theirs")):
        build(settings, tmp_path / "mine")
    assert not (tmp_path / "mine/manifest.json").exists()
