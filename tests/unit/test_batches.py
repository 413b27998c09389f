"""Tokens in motion: online equals offline, N ranks equal one, a seek lands where it should."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from tests.corpora import Lab, check_order, documents_of, make_run, same, take
from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file, write_sealed
from tokenscale.costs.schedule import count_steps
from tokenscale.data.batches.batch import Inputs, Prefetcher, document_ids
from tokenscale.data.batches.online import OnlineDocuments
from tokenscale.data.batches.open import load_held_out, open_batches
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.data.order.permutation import permute
from tokenscale.data.parts import part_folder
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.lengths import LengthsStore
from tokenscale.data.stores.manifest import open_store, rebuild_command
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.parquet import TokenListStore
from tokenscale.data.stores.writing import merge_store, write_store
from tokenscale.data.tokenizers.backends import make_fuzz_texts
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import BATCHES, OBJECTIVES
from tokenscale.settings.run import APPROACHES, RunSettings, ValidationSettings

pytestmark = pytest.mark.slow(30)

T = 16
STREAMS = [approach for approach, entry in BATCHES.items() if entry.streams]
PAIRS = [(entry.twin, approach) for approach, entry in BATCHES.items() if entry.twin]


@pytest.mark.parametrize(("online", "offline"), PAIRS)
def test_online_and_offline_are_bit_identical(lab, tmp_path, online, offline):
    few = Lab(tmp_path, ["", "a"], vocabulary_size=262)
    for of_texts, eos, global_batch in itertools.product([lab, few], [False, True], [1, 3, 8]):
        run = {"sequence_length": T, "eos": eos, "global_batch": global_batch, "seed": global_batch}
        pair = [of_texts.batches(make_run(approach, **run)) for approach in (online, offline)]
        a, b = (take(batches, 200 // global_batch) for batches in pair)
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("approach", APPROACHES)
def test_every_world_size_reads_the_same_global_batches_from_any_step_on(lab, approach):
    run = make_run(approach, sequence_length=T, global_batch=16)
    for stop, worlds in ((40, [1, 2, 3, 5, 16]), (0, [2]), (1, [7]), (150, [3, 5])):
        check_order(lambda rank, size: lab.batches(run, rank, size), worlds, stop)


@pytest.mark.parametrize(
    "objective", [objective for objective in OBJECTIVES if objective != "causal"]
)
@pytest.mark.parametrize("approach", APPROACHES)
def test_every_other_objective_trains_on_the_same_at_every_world_size_and_from_any_step(
    lab, approach, objective
):
    changes = {
        "objective": objective,
        "document_mask": objective == "masked"
        and (approach == "packed" or BATCHES[approach].streams),
    }
    run = make_run(approach, sequence_length=T, global_batch=7, **changes)
    for stop, wrap in ((0, Prefetcher), (11, lambda x: x)):
        check_order(lambda rank, size: lab.batches(run, rank, size), (2, 3, 5), stop, wrap)


def test_digests_differ_from_step_to_step_and_seed_to_seed(lab):
    for approach in APPROACHES:
        runs = [make_run(approach, sequence_length=T, seed=seed) for seed in range(3)]
        assert (
            len({batch.order_digest for run in runs for batch in take(lab.batches(run), 10)}) == 30
        )


@pytest.mark.parametrize("approach", STREAMS)
@pytest.mark.parametrize("global_batch", [1, 3])
def test_streams_hold_whole_documents_in_the_stated_order(lab, approach, global_batch):
    """One stream, rebuilt here from its definition alone, holds exactly the tokens, labels and
    documents of the batches.
    """
    documents = documents_of(lab)
    run = make_run(
        approach,
        sequence_length=T,
        global_batch=global_batch,
        seed=2,
        repeat=1,
        document_mask=True,
    )
    n = len(documents)
    steps = 90
    tokens = []
    labels = []
    numbers = []
    for i in itertools.count():
        number = int(permute(i % n, n, run.effective_seed, i // n)[0])
        document = documents[number].tolist()
        tokens += document
        labels += [IGNORED, *document[1:]]  # what each token is as a label
        numbers += [i] * len(document)
        if len(tokens) > steps * global_batch * T:
            break
    assert i > n
    batches = take(lab.batches(run), steps)
    for place, (batch, slot) in enumerate(itertools.product(batches, range(global_batch))):
        row = slice(place * T, (place + 1) * T)
        assert batch.tokens_bt[slot].tolist() == tokens[row]
        assert batch.labels_bt[slot].tolist() == labels[place * T + 1 : (place + 1) * T + 1]
        first = numbers[place * T]
        assert batch.document_ids_bt[slot].tolist() == [k - first for k in numbers[row]]


@pytest.mark.parametrize("approach", STREAMS)
def test_one_document_of_many_passes_a_row_and_more_ranks_than_documents(tmp_path, approach):
    """An epoch of 2 tokens in rows of 16 is one step, in which every rank reads a whole row."""
    lab = Lab(tmp_path, ["abc"], vocabulary_size=262)
    run = make_run(approach, T, global_batch=3)
    assert count_steps(1, lab.batches(run).rows_per_epoch(), run.global_batch) == 1
    (document,) = documents_of(lab)
    for rank in range(3):
        batch = lab.batches(run, rank, world_size=3).next()
        assert batch.tokens_bt.tolist() == [document.tolist() * 8]
        assert batch.labels_bt.tolist() == [[*document[1:].tolist(), IGNORED] * 8]


def test_lengths_that_disagree_with_the_store_are_one_message(lab):
    run = make_run("token-list", T, global_batch=20)
    folder = lab.store(run.store)
    manifest = open_store(folder, run.store)
    lengths = TokenListStore(folder, manifest).lengths
    for total, of_documents, message in (
        (manifest["tokens_total"] + 1, lengths, "do not add up to the tokens of the manifest"),
        (manifest["tokens_total"], np.roll(lengths, 1), "a document has another length"),
    ):
        reader = TokenListStore(folder, manifest | {"tokens_total": total})
        reader.lengths = of_documents
        batches = StreamBatches([reader], run, 262, Inputs(), rebuild=[rebuild_command(folder)])
        with pytest.raises(UserError, match=message) as error:
            batches.next()
        assert error.value.facts["expected"] != error.value.facts["found"]
        assert error.value.facts["next"] == f"snakemake -f {folder / 'manifest.json'}"


def test_an_online_stream_reads_lengths_that_were_counted_before(lab, tmp_path, monkeypatch):
    """Opening tokenizes nothing; other lengths than those of the text are one message."""
    run = make_run("padding-free", T, global_batch=20)
    lengths = np.load(lab.store(run.store) / "lengths.npy")
    assert lengths.dtype == np.uint32
    assert lengths.tolist() == [len(document) for document in documents_of(lab)]
    with monkeypatch.context() as context:
        context.setattr(OnlineDocuments, "_encode", lambda *_: pytest.fail("tokenized"))
        lab.batches(run).rows_per_epoch()
    folder = shutil.copytree(lab.store(run.store), tmp_path / run.store.directory)
    np.save(folder / "lengths.npy", np.roll(lengths, 1))
    inputs = Inputs(lab.corpus, lab.tokenizer, folder)
    with pytest.raises(UserError, match="has changed"):
        open_batches(run, inputs)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["sha256"] = sha256_file(folder / "lengths.npy")
    del manifest["self_sha256"]
    write_sealed(folder / "manifest.json", record=manifest, key="self_sha256")
    with pytest.raises(UserError, match="a document has another length") as error:
        open_batches(run, inputs).next()
    assert error.value.facts["next"] == f"snakemake -f {folder / 'manifest.json'}"


def test_lengths_are_written_in_parts_and_refused_for_another_text(lab, tmp_path):
    store = StoreSettings("lengths")
    whole = np.load(lab.store(store) / "lengths.npy")
    for number in range(3):
        folder = part_folder(tmp_path / "lengths", number)
        write_store(store, lab.corpus, lab.tokenizer, folder, part=(number, 3))
    manifest = merge_store(store, lab.corpus, tmp_path / "lengths", parts=3)
    reader = LengthsStore(tmp_path / "lengths", manifest)
    assert reader.lengths_of(np.arange(len(reader))).tolist() == whole.tolist()
    assert reader.total_tokens == whole.sum()
    other = Lab(tmp_path / "other", ["other text"], vocabulary_size=262)
    with pytest.raises(UserError, match="corpus manifest, sha256"):
        open_batches(
            make_run("padding-free", T), Inputs(other.corpus, lab.tokenizer, lab.store(store))
        )


@pytest.mark.parametrize("approach", APPROACHES)
def test_counts_are_of_the_arrays_and_an_epoch_has_as_many_rows_as_there_is_to_read(lab, approach):
    """Rows of a store, or documents where each is one; of a stream its tokens, whether they are
    stored or not.
    """
    for batch in take(lab.batches(make_run(approach, sequence_length=T, global_batch=5)), 20):
        assert batch.useful_tokens == int((batch.labels_bt != IGNORED).sum())
        assert (
            batch.total_tokens == 5 * T
            and batch.tokens_bt.dtype == batch.labels_bt.dtype == np.int64
        )
    tokens = sum(map(len, documents_of(lab)))
    rows = lab.batches(make_run(approach, T)).rows_per_epoch()
    if BATCHES[approach].streams:
        assert rows == Fraction(tokens, T)
    elif approach == "packed":
        assert tokens / (T + 1) <= rows < 2 * tokens / T
    else:
        assert rows == len(documents_of(lab))


@pytest.mark.parametrize("approach", APPROACHES)
@pytest.mark.parametrize("all_documents", [True, False])
def test_what_rows_cut_is_counted_as_a_store_counts_it(lab, approach, all_documents, monkeypatch):
    """Of all documents it is the manifest's count, of some another share; nothing where documents
    stay whole.
    """
    if not all_documents:
        monkeypatch.setattr("tokenscale.data.batches.online.CUT_BYTES", 200)
    run = make_run(approach, T, global_batch=4)
    manifest = json.loads(
        (lab.store(make_run("pretokenized-padded", T).store) / "manifest.json").read_text()
    )
    share = manifest["tokens_cut"] / (manifest["tokens_in_documents"] - manifest["documents"])
    found = lab.batches(run).count_cut()
    if approach not in ("padded", "length-bucketed"):
        assert found == {}
    elif all_documents or approach == "length-bucketed":
        assert found == {run.corpus.name: pytest.approx(share)} and 0 < share < 1
    else:
        assert 0 <= found[run.corpus.name] < 1 and found[run.corpus.name] != pytest.approx(share)


@pytest.mark.parametrize(
    "approach", [approach for approach, entry in BATCHES.items() if not entry.online]
)
def test_offline_approaches_import_no_tokenizer_package_and_no_format_but_their_own(lab, approach):
    run = make_run(approach, sequence_length=T)
    code = (
        "import sys\nfrom tokenscale.data.batches.open import Inputs, open_batches\n"
        "from tokenscale.settings.run import RunSettings\n"
        f"b = open_batches(RunSettings.from_json({run.to_json()!r}), "
        f"Inputs(store={str(lab.store(run.store))!r}))\n"
        "b.next(); print(*sys.modules)"
    )
    found = {
        *subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    }
    assert not found & {"tokenizers", "tiktoken", "mistral_common", "torch"}
    others = {
        f"tokenscale.data.{name}" for name in ("batches.online", "stores.parquet", "stores.text")
    }
    assert approach != "packed" or not found & others


@pytest.mark.parametrize("approach", APPROACHES)
def test_missing_inputs_and_a_model_with_too_few_embeddings_are_named(lab, approach):
    with pytest.raises(UserError, match="given"):
        open_batches(make_run(approach, sequence_length=T), Inputs())
    with pytest.raises(UserError, match="vocabulary"):
        lab.batches(make_run(approach, sequence_length=T, model=ModelSettings(vocabulary_size=100)))


def test_a_store_of_other_text_is_refused(lab, tmp_path):
    run = make_run("packed", sequence_length=T)
    other = Lab(tmp_path, ["other text"], vocabulary_size=262)
    with pytest.raises(UserError, match="corpus manifest, sha256"):
        open_batches(run, Inputs(other.corpus, store=lab.store(run.store)))


@pytest.mark.parametrize("approach", APPROACHES)
def test_held_out_rows_attend_inside_documents_in_every_approach(lab, approach, monkeypatch):
    training = StoreSettings("packed", sequence_length=T)
    monkeypatch.setattr(RunSettings, "validation_store", training)
    run = make_run(approach, T, validation=ValidationSettings(rows=40))
    store = lab.store(run.validation_store)
    packed = PackedStore(store, open_store(store, run.validation_store))
    numbers = np.arange(min(40, len(packed)))
    expected = document_ids(packed.starts(numbers))
    assert expected.max() > 0
    inputs = Inputs(validation_store=store)
    (held_out,) = load_held_out(run, inputs, vocabulary_size=300)
    assert held_out.document_ids_bt.tolist() == expected.tolist()
    assert run.validation_attention == "inside documents"
    library = replace(run, model=replace(run.model, transformers="llama"))
    assert load_held_out(library, inputs, 300)[0].document_ids_bt is None
    assert library.validation_attention == "over whole rows"


def test_length_bucketed_rows_lie_beside_rows_of_their_length(lab):
    run = make_run("length-bucketed", sequence_length=T, global_batch=5)
    documents = documents_of(lab)
    batches = take(lab.batches(run), 64)
    found = [labels[labels != IGNORED].tolist() for b in batches for labels in b.labels_bt]
    whole = 5 * 64 // len(documents)
    expected = [d[1 : T + 1].tolist() for d in documents]
    assert all(found.count(d) >= whole * expected.count(d) for d in expected)

    def read_lengths(of):
        return [(batch.labels_bt != IGNORED).sum(axis=1) for batch in of]

    lengths = read_lengths(batches)
    in_any_order = replace(run, approach="pretokenized-padded")
    others = read_lengths(take(lab.batches(in_any_order), 64))
    assert np.mean([np.ptp(n) for n in lengths]) < 0.5 * np.mean([np.ptp(n) for n in others])
    order = [int(n.max()) for n in lengths]
    assert order != sorted(order)


def test_online_and_offline_are_bit_identical_on_1_000_hostile_documents(tmp_path):
    lab = Lab(tmp_path, make_fuzz_texts(count=1_000, seed=1), vocabulary_size=400)
    tokens = sum(len(document) for document in documents_of(lab))
    for online, offline in PAIRS:
        steps = -(-1_000 // 64) if online == "padded" else -(-tokens // (64 * 256)) + 40
        run = {"sequence_length": 256, "global_batch": 64}
        a, b = (lab.batches(make_run(approach, **run)) for approach in (online, offline))
        assert all(same(a.next(), b.next()) for _ in range(steps))


def test_document_ids_agree_with_the_pieces_of_a_real_store(lab):
    settings = make_run("packed", sequence_length=T).store
    folder = lab.store(settings)
    store = PackedStore(folder, open_store(folder, settings))
    pieces = np.load(folder / "pieces.npy")
    pointers = np.load(folder / "rows.npy")
    rows = [pieces[a:b].tolist() for a, b in zip(pointers[:-1], pointers[1:], strict=True)]
    assert any(len(row) > 2 for row in rows) and any(sum(row) < T for row in rows)
    ids = document_ids(store.starts(np.arange(len(store))))
    # by counting, one token after another; padding is one more
    for found, lengths in zip(ids, rows, strict=True):
        piece_of = [piece for piece, length in enumerate(lengths) for _ in range(length)][:T]
        assert found.tolist() == piece_of + [len(lengths)] * (T - len(piece_of))
    _, labels = store.rows(np.arange(len(store)))
    crossing = ids[:, 1:] != ids[:, :-1]
    # no label that counts is predicted over a border
    assert (labels[:, :-1][crossing] == -100).all()


@pytest.mark.parametrize("starts", [np.zeros((2, 4), dtype=bool), np.ones((2, 4), dtype=np.int64)])
def test_what_are_no_starts_of_pieces_is_refused_and_no_rows_have_no_pieces(starts):
    assert document_ids(starts[:0].astype(bool)).shape == (0, 4)
    with pytest.raises(ValueError, match="every row begins"):
        document_ids(starts)
