"""Weighted mixtures: exact shares, one order at every world size and after restarts, and what is
refused.
"""

import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import (
    HOSTILE,
    check_order,
    make_corpus,
    make_run,
    make_store,
    make_tokenizer,
    same,
    take,
    texts_around,
    texts_of,
)
from tests.refusals import refused
from tokenscale.base.errors import UserError
from tokenscale.cli.mixture import write_mixture
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import load_held_out, open_batches
from tokenscale.data.batches.repetitions import check_repetitions, count_sequences
from tokenscale.data.mixtures import open_order
from tokenscale.data.order.mixture import MixtureOrder, block_counts
from tokenscale.data.order.permutation import get_samples
from tokenscale.settings.config import Config
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.options import to_dict
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import APPROACHES, BudgetSettings, RunSettings, ValidationSettings

pytestmark = pytest.mark.slow(25)

T = 16
NAMES = ("prose", "code", "notes")
#: stages end within a block and within a global batch
STAGES = ((T * 37 - 5, (1.0, 0.0, 0.0)), (T * 50, (0.3, 0.3, 0.4)), (None, (0.1, 0.65, 0.25)))


@st.composite
def mixtures(draw):
    sources = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 400), min_size=sources, max_size=sources))
    first = 0
    stages = []
    for _ in range(draw(st.integers(1, 3))):
        raw = draw(st.lists(st.integers(0, 20), min_size=sources, max_size=sources).filter(any))
        stages.append((first, [weight / sum(raw) for weight in raw]))
        first += draw(st.integers(1, 2500))
    return sizes, stages, draw(st.integers(0, 1 << 40))


@given(mixtures())
@settings(max_examples=60)
def test_shares_are_exact_and_no_source_repeats_early(mixture):
    sizes, stages, seed = mixture
    order = MixtureOrder(sizes, stages, seed)
    positions = np.arange(stages[-1][0] + 3000)
    sources, numbers = order.locate(positions)
    samples = order.samples(positions)
    assert len({order.source_seed(source) for source in range(len(sizes))}) == len(sizes), (
        "equal sources differ"
    )
    for source, size in enumerate(sizes):
        own = sources == source
        # all samples of a source in its own order, which is no other source's, without gaps
        assert np.array_equal(numbers[own], np.arange(own.sum()))
        expected = get_samples(np.arange(own.sum()), size, order.source_seed(source))
        assert np.array_equal(samples[own] - sum(sizes[:source]), expected)
    for (first, weights), end in zip(
        stages, [*(f for f, _ in stages[1:]), len(positions)], strict=True
    ):
        counts = block_counts(tuple(weights))
        drawn = np.cumsum(sources[first:end, None] == np.arange(len(sizes)), axis=0)
        share = counts / counts.sum()
        ideal = np.arange(1, end - first + 1)[:, None] * share
        assert (np.abs(drawn - ideal) <= 1 + len(sizes) * share + 1e-9).all()
        if end - first >= counts.sum():
            assert np.array_equal(drawn[counts.sum() - 1], counts)
        assert (np.abs(share - weights) < 0.5 / counts.sum() + 1e-12).all() and not counts[
            np.array(weights) == 0
        ].any()


@given(mixtures(), st.integers(1, 7), st.integers(0, 900))
@settings(max_examples=60)
def test_an_order_is_a_function_of_the_position(mixture, global_batch, steps):
    order = MixtureOrder(*mixture)
    positions = np.arange(steps * global_batch + 50)
    sources, _ = order.locate(positions)
    shuffled = np.random.default_rng(0).permutation(positions)
    assert np.array_equal(order.samples(shuffled), order.samples(positions)[shuffled])
    for count in (0, steps, len(positions)):
        assert np.array_equal(
            order.count(count), np.bincount(sources[:count], minlength=len(mixture[0]))
        )


def test_fractions_are_kept_exactly():
    for weights, counts in [
        ([0.7, 0.3], [700, 300]),
        ([1 / 3, 2 / 3], [334, 668]),
        ([0.125, 0.875], [125, 875]),
        ([1.0], [1000]),
        ([0.0, 1.0], [0, 1000]),
        ([1 / 7, 2 / 7, 4 / 7], [143, 286, 572]),
    ]:
        assert block_counts(tuple(weights)).tolist() == counts


class MixedLab:
    """Corpora of one tokenizer, their stores, and the manifests of mixtures of them."""

    def __init__(self, folder, validation_share=1e-9):
        self.folder = folder
        texts = (
            [*HOSTILE, *texts_around(T)],
            [f"def f{i}(): {'pass ' * i}" for i in range(40)],
            ["x" * 9, "y" * 50],
        )
        self.corpora = [
            make_corpus(folder / "corpus" / name, of_name, validation_share=validation_share)
            for name, of_name in zip(NAMES, texts, strict=True)
        ]
        self.tokenizer = make_tokenizer(folder / "tokenizer", self.corpora[0], 262)

    def manifest(self, names, store=None):
        found = {}
        for name in names:
            path = corpus = self.corpora[NAMES.index(name)]
            if store is not None:
                path = self.folder / "tokens" / name / store.directory
                if not (path / "manifest.json").exists():
                    make_store(path.parent, corpus, self.tokenizer, store)
            found[name] = path / "manifest.json"
        path = (
            self.folder
            / "mixtures"
            / "-".join(names)
            / (store.directory if store else "")
            / "manifest.json"
        )
        write_mixture(found, path)
        return path

    def batches(self, run, rank=0, world_size=1):
        if run.mixture is None:
            text = self.corpora[0]
            store = self.folder / "tokens/prose" / run.store.directory if run.store else None
        else:
            names = [corpus.name for corpus in run.trained_corpora]
            text = self.manifest(names).parent
            store = self.manifest(names, run.store) if run.store else None
        return open_batches(
            run, Inputs(text, self.tokenizer, store, rank=rank, world_size=world_size)
        )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return MixedLab(tmp_path_factory.mktemp("mixed"))


def make_mixture(stages=STAGES, names=NAMES, limit=None):
    return MixtureSettings(
        tuple(MixtureSource(CorpusSettings(name), limit) for name in names),
        tuple(MixtureStage(*stage) for stage in stages),
    )


def mixed_run(approach, mixture=None, **values):
    run = make_run(approach, **{"sequence_length": T, "global_batch": 9, "seed": 5, **values})
    return replace(run, corpus=CorpusSettings("mix"), mixture=mixture or make_mixture())


@pytest.mark.parametrize("approach", APPROACHES)
def test_a_mixture_of_one_corpus_is_the_corpus(mixed, approach):
    one = make_mixture([(T * 20, (1.0,)), (None, (1.0,))], ["prose"])
    run = mixed_run(approach, one)
    mixed.batches(run)  # makes the store
    found = mixed.batches(run)
    expected = mixed.batches(replace(run, mixture=None))
    assert all(same(a, b) for a, b in zip(take(found, 40), take(expected, 40), strict=True))


@pytest.mark.parametrize(
    ("online", "offline"), [(entry.twin, name) for name, entry in BATCHES.items() if entry.twin]
)
def test_online_and_offline_are_bit_identical(mixed, online, offline):
    for global_batch in (1, 3, 8):
        found = [
            take(mixed.batches(mixed_run(name, global_batch=global_batch)), 60)
            for name in (online, offline)
        ]
        assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("approach", APPROACHES)
def test_every_world_size_reads_the_same_global_batches_from_any_step_on(mixed, approach):
    """From a step in the second stage, and from one in the last."""
    run = mixed_run(approach, global_batch=16)
    for stop, worlds in ((3, [1, 2, 5, 16]), (29, [2, 4])):
        check_order(lambda rank, size: mixed.batches(run, rank, size), worlds, stop)


@pytest.mark.parametrize(
    "approach", [name for name, entry in BATCHES.items() if name != "length-bucketed"]
)
def test_rows_and_their_document_masks_are_those_of_the_sources_in_their_own_order(mixed, approach):
    """Each source's rows in a mixture are the rows of a mixture of that source alone, for one
    slot.
    """
    run = mixed_run(approach, global_batch=1, document_mask=approach == "packed")
    starts = run.mixture.stage_starts(T)
    order = MixtureOrder(
        [5, 5, 5], list(zip(starts, (s.weights for s in run.mixture.stages), strict=True)), 5
    )
    sources, _ = order.locate(np.arange(200))
    rows = take(mixed.batches(run), 200)
    assert starts == [0, 37, 87] and not sources[:37].any() and set(sources[37:]) == {0, 1, 2}
    for source, name in enumerate(NAMES):
        alone = replace(
            run, mixture=make_mixture([(None, (1.0,))], [name]), seed=order.source_seed(source)
        )
        expected = mixed.batches(alone)
        for i in np.flatnonzero(sources == source):
            row = expected.next()
            for name in (
                "tokens_bt",
                "labels_bt",
                *(["document_ids_bt"] if approach == "packed" else []),
            ):
                assert getattr(row, name).tolist() == getattr(rows[i], name).tolist()


@pytest.mark.parametrize("approach", [name for name, entry in BATCHES.items() if entry.streams])
def test_digests_tell_the_documents_of_corpora_apart(mixed, approach, monkeypatch):
    found = []
    monkeypatch.setattr(
        "tokenscale.data.batches.streams.row_digest",
        lambda step, slots, documents, offsets: found.append(documents) or 0,
    )
    run = mixed_run(approach)
    take(mixed.batches(run), 30)
    sizes = [len(texts_of(corpus)) for corpus in mixed.corpora]
    firsts = np.cumsum([0, *sizes])
    sources, _ = open_order(run, sizes).locate(np.arange(30 * run.global_batch))
    numbers = np.concatenate(found)
    assert np.array_equal(np.searchsorted(firsts, numbers, side="right") - 1, sources)


@pytest.mark.parametrize("approach", ["padded", "length-bucketed"])
def test_what_rows_cut_is_counted_by_corpus(mixed, approach):
    run = mixed_run(approach)
    found = mixed.batches(run).count_cut()
    assert list(found) == [corpus.name for corpus in run.trained_corpora] and len(
        set(found.values())
    ) == len(found)


def test_each_corpus_has_its_own_held_out_rows(tmp_path):
    mixed = MixedLab(tmp_path, validation_share=0.4)
    run = replace(mixed_run("packed"), validation=ValidationSettings(rows=2))
    path = mixed.manifest(NAMES[:2], run.validation_store)
    run = replace(run, mixture=make_mixture([(None, (0.0, 1.0))], NAMES[:2]))
    slices = load_held_out(run, Inputs(validation_store=path), 262)
    # also of the corpus without a weight
    assert [held_out.corpus for held_out in slices] == ["prose", "code"]
    ranks = [
        load_held_out(run, Inputs(validation_store=path, rank=rank, world_size=3), 262)
        for rank in range(3)
    ]
    for number, held_out in enumerate(slices):
        alone = replace(run, mixture=None, corpus=CorpusSettings(NAMES[number]))
        store = mixed.folder / "tokens" / NAMES[number] / run.validation_store.directory
        (expected,) = load_held_out(alone, Inputs(validation_store=store), 262)
        assert held_out.tokens_bt.tolist() == expected.tokens_bt.tolist()
        assert held_out.global_rows == expected.global_rows > 0
        # each slice over all ranks
        rows = [row for rank in ranks for row in rank[number].tokens_bt.tolist()]
        assert rows == held_out.tokens_bt.tolist()


@pytest.mark.parametrize("approach", APPROACHES)
def test_more_text_than_there_is_is_refused_before_training(mixed, approach):
    stages = [(None, (0.5, 0.5, 0.0))]
    run = mixed_run(approach, make_mixture(stages))
    trained = NAMES[:2]  # the third corpus is only validated
    manifests = {"corpus": mixed.manifest(trained), "tokenizer": mixed.tokenizer / "manifest.json"}
    if run.store:
        manifests["store"] = mixed.manifest(trained, run.store)
    limited = replace(run, mixture=make_mixture(stages, limit=2))
    per_pass = count_sequences(limited, manifests)
    assert len(per_pass) == 2
    enough = int(min(per_pass) * 2 * 2 / 9)  # 2 passes, half of the sequences, global batches of 9
    check_repetitions(replace(limited, budget=BudgetSettings(steps=max(1, enough - 1))), manifests)
    with pytest.raises(UserError, match="maximum number of repetitions") as error:
        check_repetitions(replace(limited, budget=BudgetSettings(steps=enough + 2)), manifests)
    assert error.value.facts["source"] == NAMES[int(np.argmin(per_pass))]
    # no limits: nothing is read
    check_repetitions(replace(run, budget=BudgetSettings(steps=10**9)), {})


def test_a_launch_refuses_more_text_than_there_is_before_the_ranks_start(mixed, tmp_path, capsys):
    mixture = make_mixture([(None, (0.5, 0.5))], NAMES[:2], limit=0.01)
    run = replace(mixed_run("packed", mixture), budget=BudgetSettings(steps=50))
    store = mixed.manifest(NAMES[:2], run.store)
    words = ["launch", "--run", run.to_json(), "--output", tmp_path / "done.json", "--store", store]
    words += [
        "--corpus",
        mixed.manifest(NAMES[:2]),
        "--tokenizer",
        mixed.tokenizer / "manifest.json",
    ]
    assert "raise mixtures.mix.maximum_repetitions" in refused(capsys, words)
    assert not list(tmp_path.glob("attempt=*"))


def test_a_corpus_without_a_weight_changes_no_batch(mixed):
    for approach in ("packed", "token-list"):
        run = mixed_run(approach, make_mixture([(None, (0.4, 0.6))], ("code", "prose")))
        more = mixed_run(
            approach, make_mixture([(None, (0.4, 0.0, 0.6))], ("code", "notes", "prose"))
        )
        both = [take(mixed.batches(each), 30) for each in (run, more)]
        assert all(same(a, b) for a, b in zip(*both, strict=True))


def test_large_and_uneven_mixtures_stay_cheap():
    """Blocks of many positions are computed one after the other: memory is bounded."""
    weights = [1e-4, *[(1 - 1e-4) / 299] * 299]
    assert block_counts(tuple(weights)).sum() >= 100_000
    order = MixtureOrder([10**9] * 300, [(0, weights)], 1)
    before = tracemalloc.start() or tracemalloc.get_traced_memory()[0]
    sources, _ = order.locate(np.arange(0, 20_000_000, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sources) == 20_000 and peak - before < 200 << 20


def test_an_empty_source_needs_the_weight_0(mixed, tmp_path):
    with pytest.raises(ValueError, match="no samples"):
        MixtureOrder([3, 0], [(0, [0.5, 0.5])], 0)
    with pytest.raises(UserError, match="no training documents"):
        open_order(mixed_run("packed"), [3, 0, 2])
    order = MixtureOrder([3, 0, 2], [(0, [0.5, 0.0, 0.5])], 0)
    assert set(order.samples(np.arange(100)).tolist()) == set(range(5))


def test_changed_missing_and_other_sources_are_refused(tmp_path):
    lab = MixedLab(tmp_path)
    run = mixed_run("packed")
    path = lab.manifest(NAMES, run.store)
    source = lab.folder / "tokens/code" / run.store.directory / "manifest.json"

    def refuse(match, run=run):
        with pytest.raises(UserError, match=match) as error:
            open_batches(run, Inputs(store=path, tokenizer=lab.tokenizer))
        return error.value.facts

    facts = refuse(
        "other sources than the run",
        replace(run, mixture=make_mixture([(None, (0.5, 0.5))], NAMES[:2])),
    )
    assert facts["expected"] == "prose, code" and "snakemake -f" in facts["next"]
    text = source.read_text()
    source.write_text(text + "\n")
    assert refuse("built again with other content")["source"] == "code"
    source.unlink()
    refuse("a source of the mixture is missing")
    source.write_text(text)
    path.write_text('{"schema_version": 1, "sources": [{"name": 3}]}')
    refuse("malformed|manifest of the mixture")
    lab.tokenizer = make_tokenizer(tmp_path / "other", lab.corpora[1], 261)
    shutil.rmtree(source.parent)
    lab.manifest(NAMES, run.store)
    assert "tokenizer file" in refuse("does not match this run")["run"]


CORPORA = {"a": {"source": {"documents": 5}}, "b": {"source": {"documents": 6}}}
TOKENIZERS = {"numbers": {"kind": "numbers", "vocabulary_size": 50260}}


def configure(weights, name="mix", **runs):
    config = Config(
        {
            "corpora": CORPORA,
            "tokenizers": TOKENIZERS,
            "mixtures": {name: weights},
            "experiments": [],
        }
    )
    values = {"corpus": name, "tokenizer": "numbers", **runs}
    return config.run_settings(values, repeat=0, file="e.yaml")


#: mixture, key in the message, what it says
WRONG = [
    ({"weights": {"a": -1, "b": 2}}, "weights.a", "from 0 to 1e"),
    ({"weights": {"a": 0, "b": 0}}, "weights", "add up to 0"),
    ({"weights": {"a": float("nan")}}, "weights.a", "not a finite number"),
    *(
        ({"weights": {"a": value, "b": 1}}, "weights.a", "from 0 to 1e")
        for value in (1e308, True, "0.5", None)
    ),
    ({"weights": {1: 0.5}}, "weights.1", "not text: 1"),
    ({"weights": [1, 2]}, "weights", "cannot be"),
    ({"weights": {"a": 1, "c": 1}}, "weights.c", "unknown corpus 'c'"),
    ({"weights": {"a": 1, "b": 1e-6}}, "weights.b", "below 0.0001"),
    ({"weights": {}}, "weights", "either `weights` or `stages`"),
    (
        {"weights": {"a": 1}, "stages": [{"weights": {"a": 1}}]},
        "weights",
        "either `weights` or `stages`",
    ),
    (
        {"stages": [{"weights": {"a": 1}}, {"weights": {"b": 1}}]},
        "stages.0.tokens",
        "length in tokens",
    ),
    ({"stages": [{"weights": {"a": 1}, "tokens": 5}]}, "stages.0.tokens", "lasts to the end"),
    *(
        (
            {"stages": [{"weights": {"a": 1}, "tokens": tokens}, {"weights": {"b": 1}}]},
            "stages.0.tokens",
            "cannot be",
        )
        for tokens in (0, True, 10**22)
    ),
    (
        {"stages": [{"weights": {"a": 1}, "tokens": 5}, {"weights": {"c": 1}}]},
        "stages.1.weights.c",
        "unknown",
    ),
    (
        {"stages": [{"weights": {"a": 1}, "tokens": 5}, {"weights": {"b": -1}}]},
        "stages.1.weights.b",
        "from 0",
    ),
    *(
        (
            {"weights": {"a": 1}, "maximum_repetitions": limit},
            "maximum_repetitions",
            "above 0|not a finite",
        )
        for limit in (0, True, [1], float("inf"))
    ),
    ({"weights": {"a": 1}, "maximum_repetitions": {"a": "x"}}, "maximum_repetitions.a", "above 0"),
    (
        {"weights": {"a": 1}, "maximum_repetitions": {"b": 2}},
        "maximum_repetitions.b",
        "no such corpus",
    ),
    ({"weights": {"a": 1}, "weight": 3}, "weight", "unknown key"),
]


@pytest.mark.parametrize(("mixture", "key", "says"), WRONG)
def test_a_wrong_mixture_is_one_message(mixture, key, says):
    with pytest.raises(UserError, match=says) as error:
        configure(mixture)
    assert (
        error.value.facts["key"].startswith(f"mixtures.mix.{key}") and "next" in error.value.facts
    )


def test_what_a_mixture_cannot_have_is_named():
    wrong = {"budget": {"epochs": 1, "useful_tokens": 1000, "wall_s": 10}}
    wrong |= {"validation": {"each_epoch": True, "bleu": 5}}
    for section, name in [(section, name) for section, names in wrong.items() for name in names]:
        with pytest.raises(UserError, match="do not fit together") as error:
            configure({"weights": {"a": 1, "b": 1}}, **{section: {name: wrong[section][name]}})
        assert error.value.facts["key"] == f"runs.{section}.{name}"
    for changes, says in (({"name": "a"}, "cannot be named 'a'"), ({"mixture": {}}, "filled in")):
        with pytest.raises(UserError, match=says):
            configure({"weights": {"a": 1, "b": 1}}, **changes)


def test_weights_are_shares_and_names_are_labels():
    base = configure({"weights": {"a": 7, "b": 3}})
    assert base.mixture.stages[0].weights == (0.7, 0.3) and base.corpora[1].source.documents == 6
    assert configure({"weights": {"a": 0.7, "b": 0.3}}).identity == base.identity
    assert configure({"weights": {"b": 3, "a": 7}}).identity == base.identity
    assert (
        configure({"stages": [{"weights": {"a": 70, "b": 30}}]}, name="other").identity
        == base.identity
    )
    assert configure({"weights": {"a": 0.6, "b": 0.4}}).identity != base.identity
    assert (
        configure({"weights": {"a": 7, "b": 3}, "maximum_repetitions": 2}).identity == base.identity
    )
    assert (
        configure({"weights": {"a": 7, "b": 3}, "maximum_repetitions": {}}).identity
        == base.identity
    )
    thirds = [
        configure({"weights": {"a": 9 * x, "b": 7 * x}}).identity for x in (1, 0.1, 1e-3, 1e6)
    ]
    assert len(set(thirds)) == 1
    assert RunSettings.from_json(base.to_json()) == base
    assert "mixture" not in to_dict(RunSettings())
    limits = configure(
        {"weights": {"a": 7, "b": 3}, "maximum_repetitions": {"b": None}}
    ).mixture.sources
    assert [source.maximum_repetitions for source in limits] == [1.0, None]


def test_shares_of_a_run_follow_its_stages():
    for steps, code, notes in (
        (10, 0, 0),
        (37, 0, 0),
        (87, 15, 20),
        (1000, 15 + 913 * 0.65, 20 + 913 * 0.25),
    ):
        shares = {"prose": 1 - (code + notes) / steps, "code": code / steps, "notes": notes / steps}
        assert make_mixture().shares(steps, T) == pytest.approx(shares)
