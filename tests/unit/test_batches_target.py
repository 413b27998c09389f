"""Pairs of a text and its translation: one document each, in every approach; and labels of the targets alone."""

import copy
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import HOSTILE, GrammarLab, Lab, check_order, make_run, same, take
from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.objectives import ignore_sources
from tokenscale.data.batches.open import load_held_out
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.stores.text import encode_documents
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import CleaningSettings, CorpusSettings, SourceSettings, StoreSettings

T = 64
PAIRS = [(f"ein Haus und {i} B\u00e4ume", f"a house and {i} trees") for i in range(40)]
PAIRS += [(a, b) for a, b in zip(HOSTILE, reversed(HOSTILE), strict=True)] + [("lang " * 40, "long " * 60), ("", "x")]
ROWS = ["padded", "pretokenized-padded", "length-bucketed", "packed"]
RUN = {"eos": True, "global_batch": 6, "micro_batch": 6}


class Pairs(GrammarLab):
    """As `Lab`, of these pairs."""

    def __init__(self, directory, pairs=PAIRS, validation_share=0.1):
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"en": [b for _, b in pairs], "de": [a for a, _ in pairs]}), directory / "pairs.parquet"
        )
        files = {"files": (str(directory / "pairs.parquet"),), "text_column": "de", "target_column": "en"}
        settings = CorpusSettings(
            name="tiny",
            source=SourceSettings(kind="files", **files),
            cleaning=CleaningSettings(strip=False, minimum_characters=0, deduplicate=False),
            validation_share=validation_share,
            row_group_rows=7,
        )
        super().__init__(directory, settings, 300)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def documents(lab):
    tokenizer, text = load_tokenizer(lab.tokenizer), RawText(lab.corpus)
    pairs = [text.text(i).split(PAIR) for i in range(len(text))]
    return [tuple(ids.tolist() for ids in tokenizer.encode_batch(pair)) for pair in pairs]


def epoch(lab, approach, **changes):
    batches = lab.batches(make_run(approach, T, **RUN, **changes))
    return take(batches, int(batches.rows_per_epoch()) // RUN["global_batch"] + 1)


@pytest.mark.parametrize("approach", ["padded", "pretokenized-padded"])
def test_rows_are_source_eos_target_eos_cut_or_padded(lab, documents, approach):
    tokenizer = load_tokenizer(lab.tokenizer)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    expected = [[bos, *source, eos, *target, eos][: T + 1] for source, target in documents]
    found = []
    for batch in epoch(lab, approach):
        for tokens, labels in zip(batch.tokens_bt, batch.labels_bt, strict=True):
            length = int(np.count_nonzero(labels != IGNORED))
            found.append([*tokens[:1].tolist(), *labels[:length].tolist()])
            assert (labels[length:] == IGNORED).all() and tokens[1:length].tolist() == labels[: length - 1].tolist()
    assert sorted(found[: len(expected)]) == sorted(expected)


@pytest.mark.parametrize("pair", [("padded", "pretokenized-padded"), ("padding-free", "token-list")])
def test_online_and_offline_are_bit_identical_on_pairs(lab, pair):
    changes = {"labels": "target"} if pair[0] == "padded" else {}
    online, offline = (lab.batches(make_run(approach, T, **RUN, **changes)) for approach in pair)
    assert all(same(online.next(), offline.next()) for _ in range(30))


@pytest.mark.parametrize("approach", ROWS)
def test_only_targets_and_their_eos_count(lab, documents, approach):
    """Against a search, label by label, for the document that a row holds."""
    tokenizer = load_tokenizer(lab.tokenizer)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    plain, targets = epoch(lab, approach), epoch(lab, approach, labels="target")
    counted = 0
    for before, after in zip(plain, targets, strict=True):
        assert np.array_equal(before.tokens_bt, after.tokens_bt) and before.order_digest == after.order_digest
        for tokens, all_labels, labels in zip(before.tokens_bt, before.labels_bt, after.labels_bt, strict=True):
            source = bool(tokens[0] == bos)
            for t in range(len(tokens)):
                source = tokens[t] == bos or (source and tokens[t] != eos)
                assert labels[t] == (IGNORED if source else all_labels[t])
        assert after.useful_tokens == np.count_nonzero(after.labels_bt != IGNORED) < before.useful_tokens
        counted += after.useful_tokens
    if approach == "packed":  # rows of an epoch hold every document once; the last batch begins the next epoch
        whole = sum(len(target) + 1 for _, target in documents)
        assert whole <= counted <= whole + T * RUN["global_batch"]


@pytest.mark.parametrize("approach", ["padded", "packed"])
def test_targets_are_the_same_at_every_world_size_and_after_a_resumption(lab, approach):
    run = make_run(approach, T, labels="target", **RUN)
    check_order(lambda rank, size: lab.batches(run, rank, size), (2, 3, 5), 7)


def test_the_held_out_slice_predicts_targets_alone(lab):
    run = make_run("padded", T, labels="target", **RUN)
    store = StoreSettings("packed", split="validation", sequence_length=T, eos=True)
    manifest = read_store_manifest(lab.store(store))
    inputs = Inputs(validation_store=lab.store(store))
    found = load_held_out(run, inputs, 300)[0]
    plain = load_held_out(make_run("padded", T, **RUN), inputs, 300)[0]
    expected = plain.labels_bt.copy()
    ignore_sources(plain.tokens_bt, expected, manifest["bos_id"], manifest["eos_id"])
    assert np.array_equal(found.labels_bt, expected) and not np.array_equal(plain.labels_bt, expected)
    assert manifest["document_parts"] == "source, EOS, target"


def test_a_row_that_begins_inside_a_document_begins_with_a_target(lab):
    tokens, labels = np.array([[5, 6, 1, 0, 7, 1, 8, 1]]), np.arange(8)[None].copy()
    ignore_sources(tokens, labels, bos_id=0, eos_id=1)
    assert labels.tolist() == [[0, 1, 2, IGNORED, IGNORED, 5, 6, 7]]
    tokenizer = load_tokenizer(lab.tokenizer)
    (document,) = encode_documents(tokenizer, [f"a{PAIR}b"], eos=True)
    assert np.count_nonzero(document == tokenizer.eos_id) == 1, "text with the mark in it is no pair"


def test_pairs_without_eos_and_targets_without_pairs_are_refused(lab, tmp_path):
    with pytest.raises(UserError, match="pairs need EOS"):
        lab.batches(make_run("padded", T))
    with pytest.raises(UserError, match="pairs need EOS"):
        lab.store(StoreSettings("packed", sequence_length=T))
    other = Lab(tmp_path / "other", ["no pairs at all"])
    for approach in ("padded", "packed"):
        with pytest.raises(UserError, match="the documents are not pairs"):
            other.batches(make_run(approach, T, labels="target", **RUN))


def test_a_tokenizer_of_one_control_id_shows_no_targets(lab, tmp_path):
    other = copy.copy(lab)
    other.tokenizer = shutil.copytree(lab.tokenizer, tmp_path / "tokenizer")
    manifest = json.loads((other.tokenizer / "manifest.json").read_text())
    (other.tokenizer / "manifest.json").write_text(json.dumps(manifest | {"eos_id": manifest["bos_id"]}))
    (other.tokenizer / "build.json").unlink()  # which holds the manifest's hash
    with pytest.raises(UserError, match="different ids for BOS and EOS"):
        other.batches(make_run("padded", T, labels="target", **RUN))


def test_runs_that_cannot_predict_targets_alone_say_so():
    def problems(**changes):
        run = make_run(**({"sequence_length": T, "labels": "target", "approach": "packed", "eos": True} | changes))
        return [key for key, _ in run.problems() if key == "labels"]

    assert problems() == []
    wrong = [{"approach": approach} for approach in ("token-list", "padding-free")]
    for changes in [*wrong, {"packing": "concatenate"}, {"eos": False}, {"objective": "masked"}]:
        assert problems(**changes) == ["labels"], changes
