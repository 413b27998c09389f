"""Objectives: labels of translations alone, and masked tokens, alike wherever a sample is."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import HOSTILE, GrammarLab, Lab, check_order, make_run, same, take
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.objectives import ignore_sources, mask_tokens, open_masked
from tokenscale.data.batches.open import load_held_out, open_batches
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.stores.text import encode_documents
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.run import APPROACHES, MaskingSettings, ValidationSettings

T = 64
PAIRS = [(f"ein Haus und {i} B\u00e4ume", f"a house and {i} trees") for i in range(40)]
PAIRS += [(a, b) for a, b in zip(HOSTILE, reversed(HOSTILE), strict=True)] + [
    ("lang " * 40, "long " * 60),
    ("", "x"),
]
ROWS = ["padded", "pretokenized-padded", "length-bucketed", "packed"]
RUN = {"eos": True, "global_batch": 6, "micro_batch": 6}


class Pairs(GrammarLab):
    """As `Lab`, of these pairs."""

    def __init__(self, directory, pairs=PAIRS, validation_share=0.1):
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"en": [b for _, b in pairs], "de": [a for a, _ in pairs]}),
            directory / "pairs.parquet",
        )
        files = {
            "files": (str(directory / "pairs.parquet"),),
            "text_column": "de",
            "target_column": "en",
        }
        settings = CorpusSettings(
            name="tiny",
            source=SourceSettings(kind="files", **files),
            cleaning=CleaningSettings(strip=False, minimum_characters=0, deduplicate=False),
            validation_share=validation_share,
            row_group_rows=7,
        )
        super().__init__(directory, settings, 300)


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def documents(translations):
    tokenizer = load_tokenizer(translations.tokenizer)
    text = RawText(translations.corpus)
    pairs = [text.text(i).split(PAIR) for i in range(len(text))]
    return [tuple(ids.tolist() for ids in tokenizer.encode_batch(pair)) for pair in pairs]


def epoch(translations, approach, **changes):
    batches = translations.batches(make_run(approach, T, **RUN, **changes))
    return take(batches, int(batches.rows_per_epoch()) // RUN["global_batch"] + 1)


@pytest.mark.parametrize("approach", ["padded", "pretokenized-padded"])
def test_rows_are_source_eos_target_eos_cut_or_padded(translations, documents, approach):
    tokenizer = load_tokenizer(translations.tokenizer)
    bos = tokenizer.bos_id
    eos = tokenizer.eos_id
    expected = [[bos, *source, eos, *target, eos][: T + 1] for source, target in documents]
    found = []
    for batch in epoch(translations, approach):
        for tokens, labels in zip(batch.tokens_bt, batch.labels_bt, strict=True):
            length = int(np.count_nonzero(labels != IGNORED))
            found.append([*tokens[:1].tolist(), *labels[:length].tolist()])
            assert (labels[length:] == IGNORED).all() and tokens[1:length].tolist() == labels[
                : length - 1
            ].tolist()
    assert sorted(found[: len(expected)]) == sorted(expected)


@pytest.mark.parametrize(
    "pair", [("padded", "pretokenized-padded"), ("padding-free", "token-list")]
)
def test_online_and_offline_are_bit_identical_on_pairs(translations, pair):
    changes = {"labels": "target"} if pair[0] == "padded" else {}
    online, offline = (
        translations.batches(make_run(approach, T, **RUN, **changes)) for approach in pair
    )
    assert all(same(online.next(), offline.next()) for _ in range(30))


@pytest.mark.parametrize("approach", ROWS)
def test_only_targets_and_their_eos_count(translations, documents, approach):
    """Against a search, label by label, for the document that a row holds."""
    tokenizer = load_tokenizer(translations.tokenizer)
    bos = tokenizer.bos_id
    eos = tokenizer.eos_id
    plain = epoch(translations, approach)
    targets = epoch(translations, approach, labels="target")
    counted = 0
    for before, after in zip(plain, targets, strict=True):
        assert (
            np.array_equal(before.tokens_bt, after.tokens_bt)
            and before.order_digest == after.order_digest
        )
        for tokens, all_labels, labels in zip(
            before.tokens_bt, before.labels_bt, after.labels_bt, strict=True
        ):
            source = bool(tokens[0] == bos)
            for t in range(len(tokens)):
                source = tokens[t] == bos or (source and tokens[t] != eos)
                assert labels[t] == (IGNORED if source else all_labels[t])
        assert (
            after.useful_tokens
            == np.count_nonzero(after.labels_bt != IGNORED)
            < before.useful_tokens
        )
        counted += after.useful_tokens
    # rows of an epoch hold every document once; the last batch begins the next epoch
    if approach == "packed":
        whole = sum(len(target) + 1 for _, target in documents)
        assert whole <= counted <= whole + T * RUN["global_batch"]


@pytest.mark.parametrize("approach", ["padded", "packed"])
def test_targets_are_the_same_at_every_world_size_and_after_a_resumption(translations, approach):
    run = make_run(approach, T, labels="target", **RUN)
    check_order(lambda rank, size: translations.batches(run, rank, size), (2, 3, 5), 7)


def test_the_held_out_slice_predicts_targets_alone(translations):
    run = make_run("padded", T, labels="target", **RUN)
    store = StoreSettings("packed", split="validation", sequence_length=T, eos=True)
    manifest = read_store_manifest(translations.store(store))
    inputs = Inputs(validation_store=translations.store(store))
    found = load_held_out(run, inputs, 300)[0]
    plain = load_held_out(make_run("padded", T, **RUN), inputs, 300)[0]
    expected = plain.labels_bt.copy()
    ignore_sources(plain.tokens_bt, expected, manifest["bos_id"], manifest["eos_id"])
    assert np.array_equal(found.labels_bt, expected) and not np.array_equal(
        plain.labels_bt, expected
    )
    assert manifest["document_parts"] == "source, EOS, target"


def test_a_row_that_begins_inside_a_document_begins_with_a_target(translations):
    tokens = np.array([[5, 6, 1, 0, 7, 1, 8, 1]])
    labels = np.arange(8)[None].copy()
    ignore_sources(tokens, labels, bos_id=0, eos_id=1)
    assert labels.tolist() == [[0, 1, 2, IGNORED, IGNORED, 5, 6, 7]]
    tokenizer = load_tokenizer(translations.tokenizer)
    (document,) = encode_documents(tokenizer, [f"a{PAIR}b"], eos=True)
    assert np.count_nonzero(document == tokenizer.eos_id) == 1, (
        "text with the mark in it is no pair"
    )


def test_pairs_without_eos_and_targets_without_pairs_are_refused(translations, tmp_path):
    with pytest.raises(UserError, match="pairs need EOS"):
        translations.batches(make_run("padded", T))
    with pytest.raises(UserError, match="pairs need EOS"):
        translations.store(StoreSettings("packed", sequence_length=T))
    other = Lab(tmp_path / "other", ["no pairs at all"])
    for approach in ("padded", "packed"):
        with pytest.raises(UserError, match="the documents are not pairs"):
            other.batches(make_run(approach, T, labels="target", **RUN))


def test_a_tokenizer_of_one_control_id_shows_no_targets(translations, tmp_path):
    other = copy.copy(translations)
    other.tokenizer = shutil.copytree(translations.tokenizer, tmp_path / "tokenizer")
    manifest = json.loads((other.tokenizer / "manifest.json").read_text())
    (other.tokenizer / "manifest.json").write_text(
        json.dumps(manifest | {"eos_id": manifest["bos_id"]})
    )
    (other.tokenizer / "build.json").unlink()  # which holds the manifest's hash
    with pytest.raises(UserError, match="different ids for BOS and EOS"):
        other.batches(make_run("padded", T, labels="target", **RUN))


def test_runs_that_cannot_predict_targets_alone_say_so():
    def problems(**changes):
        run = make_run(
            **(
                {"sequence_length": T, "labels": "target", "approach": "packed", "eos": True}
                | changes
            )
        )
        return [key for key, _ in run.problems() if key == "labels"]

    assert problems() == []
    wrong = [{"approach": approach} for approach in ("token-list", "padding-free")]
    for changes in [*wrong, {"packing": "concatenate"}, {"eos": False}, {"objective": "masked"}]:
        assert problems(**changes) == ["labels"], changes


V = 1000
BOS = 0
EOS = 1
PAD = 2
MASK = 1000
OPTIONS = {"vocabulary_size": V, "mask_id": MASK, "special_ids": (BOS, EOS, PAD)}


def plain(n, T, seed=0):
    """Rows of ordinary tokens, one BOS at the front, nothing padded: (tokens, labels)."""
    rows = np.random.default_rng(seed).integers(3, V, (n, T + 1))
    rows[:, 0] = BOS
    return rows[:, :-1], rows[:, 1:]


def test_another_seed_or_sample_masks_otherwise():
    tokens, labels = plain(40, 64)
    asked = {"seed": 3, "samples": np.arange(40)}
    one = mask_tokens(tokens, labels, **asked, **OPTIONS)[1] != IGNORED
    for change in ({"seed": 4}, {"samples": np.arange(1, 41)}, {"seed": -1}, {"seed": 1 << 70}):
        other = mask_tokens(tokens, labels, **(asked | change), **OPTIONS)[1] != IGNORED
        assert 0.05 < (one & other).sum() / one.sum() < 0.25  # chance: 0.15


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_shares_are_those_stated(seed, share):
    tokens, labels = plain(200, 512, seed)
    inputs, targets = mask_tokens(tokens, labels, np.arange(200), seed=seed, share=share, **OPTIONS)
    chosen = targets != IGNORED

    def within(found, n, p):
        return abs(found - n * p) < 4.5 * (n * p * (1 - p)) ** 0.5

    assert within(chosen.sum(), tokens[:, 1:].size, share)
    assert within((inputs == MASK).sum(), chosen.sum(), 0.8)
    drawn = chosen & (inputs != MASK) & (inputs != tokens)
    # a draw may give the same token
    assert within(drawn.sum(), chosen.sum(), 0.1 * (1 - 1 / (V - 3)))
    by_position = chosen.sum(axis=0)[1:]
    assert abs(by_position - 200 * share).max() < 5 * (200 * share * (1 - share)) ** 0.5
    assert np.array_equal(targets[chosen], tokens[chosen])
    assert np.array_equal(inputs[~chosen], tokens[~chosen])


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_every_row_that_can_be_masked_predicts_something(length):
    tokens, labels = plain(400, 64)
    labels[:, length:], tokens[:, length + 1 :] = IGNORED, PAD
    tokens[::5, 1], labels[::5] = EOS, IGNORED  # rows with nothing to predict
    inputs, targets = mask_tokens(tokens, labels, np.arange(400), seed=0, **OPTIONS)
    assert mask_tokens(tokens[:0], labels[:0], np.arange(0), seed=0, **OPTIONS)[0].shape == (0, 64)
    counted = (targets != IGNORED).sum(axis=1)
    able = np.arange(400) % 5 > 0
    assert (counted[able] >= 1).all() and not counted[~able].any()
    if length <= 3:
        where = (targets[able, 1 : length + 1] != IGNORED).mean(axis=0)
        assert abs(where - where.mean()).max() < 0.12  # no place is preferred
    assert 0.75 < (inputs[targets != IGNORED] == MASK).mean() < 0.85


def test_draws_come_from_all_of_the_vocabulary_but_special_ids():
    for special, mask_id in (((), 12), ((0, 1, 2), 12), ((5, 11, 3, 3), 0), ((7,), 4)):
        tokens = np.full((400, 64), 6)
        options = {"vocabulary_size": 12, "mask_id": mask_id, "special_ids": special, "share": 1.0}
        inputs, _ = mask_tokens(tokens, tokens, np.arange(400), seed=0, **options)
        assert set(np.unique(inputs)) == (set(range(12)) - set(special)) | {mask_id}
        counts = np.bincount(inputs[inputs != mask_id], minlength=12)
        counts = np.array([c for i, c in enumerate(counts) if i not in {*special, mask_id, 6}])
        assert counts.min() > 0.75 * counts.mean()


@pytest.mark.parametrize("approach", APPROACHES)
def test_padding_bos_and_eos_are_never_masked(lab, approach):
    """On real batches, with all of what counts chosen: exactly the labels that count, and no
    EOS.
    """
    options = {"vocabulary_size": 262, "mask_id": 262, "special_ids": (BOS, EOS, PAD), "share": 1.0}
    for step, batch in enumerate(
        take(lab.batches(make_run(approach, 16, eos=True, global_batch=6)), 30)
    ):
        tokens = batch.tokens_bt
        labels = batch.labels_bt
        inputs, targets = mask_tokens(tokens, labels, step * 6 + np.arange(6), seed=0, **options)
        counted = np.zeros_like(tokens, dtype=bool)
        counted[:, 1:] = labels[:, :-1] != IGNORED
        assert np.array_equal(targets != IGNORED, counted & (tokens != EOS))
        assert not np.isin(targets, (BOS, EOS, PAD)).any()
        assert np.array_equal(inputs[~counted], tokens[~counted])
        assert inputs.dtype == targets.dtype == np.int64


def masked_run(approach, **changes):
    return make_run(
        approach,
        **({"sequence_length": 16, "global_batch": 7, "objective": "masked", "seed": 3} | changes),
    )


def test_a_masked_batch_is_its_approachs_with_some_places_to_be_predicted(lab):
    run = masked_run("packed", masking=MaskingSettings(share=0.5))
    plain = lab.batches(masked_run("packed", objective="causal"))
    masked = lab.batches(run)
    assert masked.rows_per_epoch() == plain.rows_per_epoch() and masked.vocabulary_size == 262 + 1
    for _ in range(10):
        a = plain.next().copy()
        b = masked.next()
        chosen = b.labels_bt != IGNORED
        # at the place itself: nothing is shifted
        assert np.array_equal(b.labels_bt[chosen], a.tokens_bt[chosen])
        assert np.array_equal(b.tokens_bt[~chosen], a.tokens_bt[~chosen])
        assert (b.tokens_bt[chosen] != a.tokens_bt[chosen]).any()
        assert b.useful_tokens == chosen.sum() and b.total_tokens == a.total_tokens
        assert b.order_digest == a.order_digest


def test_each_epoch_masks_anew(lab):
    run = masked_run("packed", global_batch=1, masking=MaskingSettings(share=0.3))
    plain = lab.batches(masked_run("packed", global_batch=1, objective="causal"))
    masked = lab.batches(run)
    rows = int(plain.rows_per_epoch())
    epochs = []
    for _ in range(2):
        pairs = [(plain.next().copy(), masked.next().copy()) for _ in range(rows)]
        epochs.append({a.tokens_bt.tobytes(): b.labels_bt for a, b in pairs})
    assert epochs[0].keys() == epochs[1].keys()
    assert any(not np.array_equal(epochs[0][row], epochs[1][row]) for row in epochs[0])


def test_a_masked_run_needs_the_tokenizer_and_the_mask_is_its_own_or_one_more_id(lab, tmp_path):
    def masking(tokenizer):
        change = open_masked(masked_run("packed"), Inputs(tokenizer=tokenizer), held_out=False)
        options = change.apply.keywords
        return (
            options["mask_id"],
            options["special_ids"],
            options["vocabulary_size"],
            change.vocabulary_size,
        )

    assert masking(lab.tokenizer) == (262, [0, 1, 2], 262, 263)
    manifest = read_json(lab.tokenizer / "manifest.json", "manifest")
    write_json(tmp_path / "manifest.json", manifest | {"mask_id": 7, "eos_id": None})
    assert masking(tmp_path) == (7, [0, 2], 262, 262)
    run = masked_run("packed")
    with pytest.raises(UserError, match="needs the tokenizer") as caught:
        open_batches(run, Inputs(store=lab.store(run.store)))
    assert "results/tokenizers/bpe" in caught.value.facts["next"]


@pytest.mark.parametrize("mask", ["[MASK]", "<blank>", None])
def test_a_tokenizer_of_others_says_which_token_masks(tmp_path, mask):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {text: n for n, text in enumerate(["<s>", "word", *([mask] if mask else [])])}
    (tmp_path / "in").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "word")).save(
        str(tmp_path / "in/tokenizer.json")
    )
    write_json(tmp_path / "in/special_tokens_map.json", {"mask_token": mask})
    manifest = build(
        TokenizerSettings(name="hf", kind="huggingface", source=str(tmp_path / "in")),
        tmp_path / "out",
    )
    change = open_masked(masked_run("packed"), Inputs(tokenizer=tmp_path / "out"), held_out=False)
    assert change.apply.keywords["mask_id"] == 2  # None: one behind the two that there are
    assert ("mask_id" in manifest) == (mask is not None)


def test_the_held_out_slice_is_masked_once_and_alike_for_every_layout_and_seed(lab, monkeypatch):
    run = masked_run("packed", validation=ValidationSettings(rows=6), document_mask=True)
    store = lab.store(run.store)  # of the training split: what is in it does not matter here
    monkeypatch.setattr(type(run), "validation_store", run.store)

    def read(run, rank=0, world_size=1):
        return load_held_out(run, Inputs(None, lab.tokenizer, None, store, rank, world_size), 263)[
            0
        ]

    whole = read(run)
    other = read(replace(run, seed=8))
    for world_size in (1, 2, 3, 5):
        parts = [read(run, rank, world_size) for rank in range(world_size)]
        for name in ("tokens_bt", "labels_bt", "document_ids_bt"):
            assert np.array_equal(
                np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)
            )
    assert np.array_equal(other.labels_bt, whole.labels_bt)
    assert (whole.labels_bt != IGNORED).any() and (whole.tokens_bt == 262).any()
