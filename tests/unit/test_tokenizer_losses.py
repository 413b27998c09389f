"""Tokenizers account for their text: what they lose is measured, their ids are a function, control
ids are no text.
"""

import functools
import json
import random
import shlex
import tempfile
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.corpora import make_corpus, make_run, make_store, make_tokenizer
from tokenscale.base.errors import UserError
from tokenscale.cli.advise import AdviceSettings, advise
from tokenscale.cli.convert import ConvertSettings, convert
from tokenscale.cli.evaluate import evaluate_bleu, evaluate_text
from tokenscale.cli.generate import generate_texts
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers import backends, huggingface
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.data.tokenizers.losses import (
    PLACE_BYTES,
    PLACES,
    describe,
    draw_sample,
    measure,
    take_sample,
)
from tokenscale.report.answers import _describe_lost_text
from tokenscale.settings.data import StoreSettings, TokenizerSettings
from tokenscale.settings.registry import FORMATS
from tokenscale.train.evaluation.generation import Pair, Sampling

ROLES = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>"}
CONTROL = {text: i for i, text in enumerate([*ROLES.values(), "<unk>"])}
LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyz <>/"))
PLAIN = ["the cat sat on the mat"] * 30
CJK = [*PLAIN, *["日本語 日本語 日本語"] * 10]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(autouse=True)
def few_fuzz_texts(monkeypatch):
    monkeypatch.setattr(
        backends, "make_fuzz_texts", functools.partial(backends.make_fuzz_texts, count=200)
    )


def vocabulary(*entries):
    return {text: i for i, text in enumerate([*CONTROL, *entries])}


def characters(**options):
    return Tokenizer(models.BPE(vocabulary(*LETTERS), [], **options))


def byte_level(*merged):
    """Byte-level BPE that also merges these words from their letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = list(dict.fromkeys(word[:n] for word in merged for n in range(2, len(word) + 1)))
    entries = [*alphabet, *(part for part in parts if part not in CONTROL)]
    made = Tokenizer(models.BPE(vocabulary(*entries), [(part[:-1], part[-1]) for part in parts]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not {*merged} & {*CONTROL}
    )
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback():
    return Tokenizer(
        models.BPE(vocabulary(*LETTERS, *BYTES), [], unk_token="<unk>", byte_fallback=True)
    )


def unigram(others=()):
    entries = [(text, 0.0) for text in CONTROL] + [(c, -2.0) for c in (*LETTERS, "▁", *others)]
    made = Tokenizer(models.Unigram(entries, 4, byte_fallback=bool(others)))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def words(unknown="<unk>"):
    made = Tokenizer(
        models.WordLevel(vocabulary("the", "cat", "sat", "on", "mat"), unk_token=unknown)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def pieces():
    entries = [*LETTERS, *(f"##{c}" for c in LETTERS)]
    made = Tokenizer(models.WordPiece(vocabulary(*entries), unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def save(tokenizer, folder, special=None, change=None, roles=None):
    """A folder as transformers writes it; `special` adds the control tokens with this flag."""
    folder.mkdir(parents=True)
    data = json.loads(tokenizer.to_str())
    flags = {
        "single_word": False,
        "lstrip": True,
        "rstrip": True,
        "normalized": True,
        "special": special,
    }
    if special is not None:
        data["added_tokens"] = [{"id": i, "content": text, **flags} for text, i in CONTROL.items()]
    data |= (change or {}).get("file", {})
    data["model"] |= (change or {}).get("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    names = {f"{role}_token": text for role, text in (ROLES | (roles or {})).items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def made(tokenizer, folder, log=print, settings=None, **options):
    source = save(tokenizer, folder / "source", **options)
    stated = TokenizerSettings(name="own", kind="huggingface", source=str(source))
    build(replace(stated, **(settings or {})), folder / "built", log=log)
    return folder / "built"


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), byte_level(*ROLES.values()), byte_fallback(), unigram(), words(), pieces()],
    ids=str,
)
def test_ids_of_the_roles_never_come_from_text(tmp_path, tokenizer, special):
    folder = made(tokenizer, tmp_path, special=special)
    manifest = json.loads((folder / "manifest.json").read_text())
    roles = {manifest[f"{role}_id"] for role in ROLES}
    assert roles == {0, 1, 2, 3}
    texts = [*ROLES.values(), *(f"the {text} cat{text}" for text in ROLES.values()), "</s></s>"]
    for engine in ("auto", "tokenizers"):
        ids = load_tokenizer(folder, engine).encode(texts)[0]
        assert ids.size and not roles & set(ids.tolist()), engine


@pytest.mark.parametrize("place", ["in the vocabulary", "after it"])
@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback, unigram, words, pieces])
def test_added_tokens_of_a_user_keep_their_ids(tmp_path, tokenizer, place):
    """The package counts their ids from the size of the vocabulary, which is smaller without
    control tokens.
    """
    own = tokenizer()
    if place == "after it":
        own.add_special_tokens(["<|a|>", "<|b|>"])
    own.add_tokens(["<user>", AddedToken("<tool>", lstrip=True, normalized=True)])
    roles = {"bos": "<|a|>", "eos": "<|b|>"} if place == "after it" else {}
    folder = made(own, tmp_path, roles=roles)
    for engine in ("auto", "tokenizers"):
        found = load_tokenizer(folder, engine).encode_batch(
            ["cat <user> on", "<tool>", "<user><tool>"]
        )
        expected = own.encode_batch(
            ["cat <user> on", "<tool>", "<user><tool>"], add_special_tokens=False
        )
        assert [ids.tolist() for ids in found] == [e.ids for e in expected], engine


def test_a_token_that_also_stands_for_something_else_has_one_meaning(tmp_path):
    tokenizer = load_tokenizer(made(words(), tmp_path / "pad", roles={"pad": "<unk>"}))
    assert tokenizer.pad_id == tokenizer.eos_id == 1
    assert tokenizer.encode(["the dog"])[0].tolist() == [5, 4]
    found = (
        load_tokenizer(made(characters(unk_token="<s>"), tmp_path / "unknown"))
        .encode(["a日b"])[0]
        .tolist()
    )
    assert found == [CONTROL["<unk>"] + 1 + LETTERS.index(c) for c in "ab"]
    for role in ("bos", "eos"):
        with pytest.raises(UserError, match="white space"):
            own = Tokenizer(models.BPE(vocabulary(*LETTERS, "\n"), []))
            made(own, tmp_path / role, roles={role: "\n"})


@pytest.mark.parametrize("tokenizer", [byte_level, unigram, pieces])
@pytest.mark.parametrize("role", ["pad", "mask"])
def test_a_letter_that_pads_stays_a_letter(tmp_path, tokenizer, role):
    for special in (True, False):
        own = tokenizer()
        own.add_tokens([AddedToken("a", special=special)])
        folder = made(own, tmp_path / str(special), roles={role: "a"})
        found = json.loads((folder / "manifest.json").read_text()).get(f"{role}_id")
        assert found in (1 if role == "pad" else None, 1)
        assert measure(load_tokenizer(folder), ["a cat"], "")["lost"] == 0


def test_pad_and_mask_inside_a_foreign_document_are_refused(tmp_path):
    settings = ConvertSettings(to="token-list", tokenizer=str(made(byte_level(), tmp_path)))
    for inside in (2, 3):
        np.array([5, inside, 6, 1, 7, 1], "<u2").tofile(tmp_path / "train.bin")
        with pytest.raises(UserError, match="PAD or MASK lies inside"):
            convert(settings, tmp_path / "train.bin", tmp_path / "store")


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("tokenizer", "change", "named"),
    [
        (byte_level("there"), {"model": {"dropout": 0.5}}, "dropout"),
        (byte_level(), {"file": {"truncation": TRUNCATION}}, "truncation"),
    ],
)
def test_what_makes_ids_random_or_cuts_them_is_switched_off_by_name(
    tmp_path, tokenizer, change, named
):
    said = []
    folder = made(tokenizer, tmp_path / "a", change=change, log=said.append)
    plain = load_tokenizer(made(tokenizer, tmp_path / "b"), "tokenizers")
    assert named in said[0] and "switched off" in said[0]
    texts = ["there and there again, there"] * 50
    for engine in ("auto", "tokenizers"):
        assert np.array_equal(
            load_tokenizer(folder, engine).encode(texts)[0], plain.encode(texts)[0]
        )
    engines = json.loads((folder / "build.json").read_text())["engines"]
    assert all(entry.get("exact", True) for entry in engines.values())


def test_a_tokenizer_that_is_random_is_refused(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(made(byte_level(), tmp_path))
    draw = random.Random(0)

    def ids(texts):
        return np.array([9 + draw.randrange(99) for _ in texts]), np.ones(len(texts), int)

    monkeypatch.setattr(tokenizer, "encode", ids)
    with pytest.raises(UserError, match="no function"):
        measure(tokenizer, PLAIN, "here")


@pytest.mark.parametrize(
    ("tokenizer", "texts", "lost", "normalised", "unknown"),
    [
        *((tokenizer, CJK, 0, 0, 0) for tokenizer in (byte_level(), byte_fallback())),
        *((tokenizer, PLAIN, 0, 0, 0) for tokenizer in (characters(), pieces())),
        (characters(), CJK, 1, 0, 0),
        *(
            (tokenizer, CJK, 1, 0, 1)
            for tokenizer in (characters(unk_token="<unk>"), unigram(), words(), pieces())
        ),
        (pieces(), ["The Cat", "É"], 0, 1, 0),
    ],
)
def test_lost_bytes_and_unknown_ids_are_measured(
    tmp_path, tokenizer, texts, lost, normalised, unknown
):
    """Of CJK, 270 of 780 bytes other than white space are lost: 10 · 3 · 3 · 3 of 30 · 17 and
    these.
    """
    folder = made(tokenizer, tmp_path / "t", settings={"accepted_loss": 1.0})
    corpus = make_corpus(tmp_path / "c", texts)
    said = []
    found = write_store(
        StoreSettings("token-list"), corpus, folder, tmp_path / "s", log=said.append
    )["text_sample"]
    assert found["lost"] == (pytest.approx(270 / 780, abs=1e-6) if lost else 0)
    assert (found["normalised"] > 0, found["unknown"] > 0) == (normalised, unknown)
    assert found["documents"] == len(texts) and any(f"{found['lost']:.2%}" in line for line in said)


FRENCH = "Élève, déjà reçu"
HTML = "<b>bold</b> and <i>thin</i> 12345"
BERT = normalizers.BertNormalizer()
UNTAGGED = normalizers.Replace(Regex("<[^>]+>"), "")


NORMALIZED = [
    (BERT, FRENCH, 0, 10 / 19),
    (BERT, unicodedata.normalize("NFD", FRENCH), 0, 10 / 19),
    (BERT, "हिन्दी", 3 / 18, 0),  # the sign that joins two letters
    (normalizers.NFD(), FRENCH, 0, 0),
    (UNTAGGED, HTML, 14 / 30, 0),
    (normalizers.Sequence([UNTAGGED, normalizers.Lowercase()]), HTML.upper(), 14 / 30, 11 / 30),
    (normalizers.Replace(Regex("[0-9]{3,}"), ""), HTML, 5 / 30, 0),
    (normalizers.NFKC(), "ｶﾞｷﾞ ﬁ", 0, 1),
    (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), UNTAGGED]),
        HTML,
        14 / 30,
        0,
    ),
    (normalizers.ByteLevel(), "日本 é", 0, 0),
    (
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex("[日本語]"), "")]),
        CJK[-1] + " ﬁx",
        27 / 31,
        3 / 31,
    ),
]


@pytest.mark.parametrize(("normalizer", "text", "lost", "normalised"), NORMALIZED)
def test_accents_and_width_are_normalised_and_what_a_pattern_deletes_is_lost(
    tmp_path, normalizer, text, lost, normalised
):
    """Shares are of the bytes of the text other than white space, with composed letters."""
    tokenizer = byte_level("▁")
    tokenizer.normalizer = normalizer
    if "ByteLevel" in repr(normalizer):
        tokenizer.pre_tokenizer = tokenizer.decoder = None
    found = measure(
        load_tokenizer(made(tokenizer, tmp_path, settings={"accepted_loss": 1.0})), [text], ""
    )
    assert (found["lost"], found["normalised"]) == (
        pytest.approx(lost, abs=0.01),
        pytest.approx(normalised, abs=0.01),
    )


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback(), unigram(BYTES)])
def test_a_decoder_that_does_not_join_bytes_is_no_loss_of_text(tmp_path, tokenizer):
    for number, decoder in enumerate([None, decoders.Metaspace(), decoders.WordPiece()]):
        tokenizer.decoder = decoder
        assert (
            measure(load_tokenizer(made(tokenizer, tmp_path / str(number))), CJK, "")["lost"] == 0
        )


def test_the_command_that_accepts_a_loss_names_bos_as_the_vocabulary_does(tmp_path):
    name = "<｜begin▁of▁text｜>"
    own = unigram()
    own.add_special_tokens([name])
    folder = made(own, tmp_path, roles={"bos": name})
    with pytest.raises(UserError) as error:
        measure(load_tokenizer(folder), CJK, "")
    command = next(
        line for line in error.value.facts["next"].splitlines() if line.startswith("tokenscale")
    )
    settings = json.loads(shlex.split(command)[3])
    assert settings["bos"] == name
    build(TokenizerSettings(**settings), tmp_path / "again")
    assert (
        0 < measure(load_tokenizer(tmp_path / "again"), CJK, "")["lost"] < settings["accepted_loss"]
    )


@pytest.mark.parametrize("tokenizer", [characters(), words(), words("none"), unigram()])
def test_a_tokenizer_that_loses_or_refuses_text_is_one_message_at_every_door(tmp_path, tokenizer):
    corpus = make_corpus(tmp_path / "c", CJK)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in CJK), "utf-8")
    strict = made(tokenizer, tmp_path / "t")

    def write(folder):
        store = StoreSettings("packed", sequence_length=16)
        return write_store(store, corpus, folder, tmp_path / "store")["text_sample"]["lost"]

    def read_online(folder, approach):
        own = TokenizerSettings(name="own", kind="bpe", corpus="tiny", vocabulary_size=300)
        run = replace(make_run(approach, 16, global_batch=2), tokenizer=own)
        lengths = make_store(tmp_path / "lengths", corpus, folder, run.store) if run.store else None
        return open_batches(run, Inputs(corpus, folder, lengths)).lost["lost"]

    def ask_advice(folder):
        said = []
        advise(AdviceSettings(tokenizer_name=str(folder)), (str(lines),), said.append)
        assert any("caution" in line and "34.6" in line for line in said)
        return 270 / 780

    doors = [
        write,
        functools.partial(read_online, approach="padded"),
        functools.partial(read_online, approach="padding-free"),
    ]
    for enter in [*doors, ask_advice]:
        with pytest.raises(UserError, match="loses|cannot encode") as error:
            enter(strict)
        assert "next" in error.value.facts and not (tmp_path / "store/manifest.json").exists()
    if "loses" in error.value.what:
        accepting = made(tokenizer, tmp_path / "again", settings={"accepted_loss": 0.9})
        assert [enter(accepting) for enter in [*doors, ask_advice]] == pytest.approx(
            [270 / 780] * 4, abs=1e-6
        )


def test_a_tokenizer_without_unknown_token_serves_text_that_it_covers(tmp_path):
    folder = made(words("none"), tmp_path / "t")
    corpus = make_corpus(tmp_path / "c", PLAIN)
    manifest = write_store(StoreSettings("token-list"), corpus, folder, tmp_path / "store")
    assert manifest["tokens_in_documents"] == 7 * len(PLAIN)
    convert(
        ConvertSettings(to="packed", sequence_length=8), tmp_path / "store", tmp_path / "converted"
    )
    converted = json.loads((tmp_path / "converted/manifest.json").read_text())
    assert converted["text_sample"] == manifest["text_sample"]


@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 40), st.integers(500, 5000), st.integers(10_000, 40_000)),
        min_size=1,
        max_size=400,
    ),
    share=st.floats(0.25, 0.5),
    place=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_a_stretch_that_is_lost_is_found_wherever_it_lies(lengths, share, place):
    """In one document or in many, of equal lengths or not, in a corpus or in a file."""
    total = sum(lengths)
    first = int(place * (1 - share) * total)
    stop = max(first + 1, int(first + share * total))
    whole = "a" * first + "ж" * (stop - first) + "a" * (total - stop)
    ends = np.cumsum(lengths).tolist()
    texts = [whole[end - n : end] for n, end in zip(lengths, ends, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder), texts, validation_share=1e-18)
        for sample in ("".join(draw_sample(corpus)), "".join(take_sample(texts))):
            assert len(sample) <= PLACES * PLACE_BYTES
            assert sample.count("ж") / len(sample) > 0.05


def test_the_report_cautions_of_unknown_ids_where_no_text_is_lost():
    shares = {"text_lost": 0.0, "text_unknown": [0, 0.03]}
    runs = pd.DataFrame(
        {"run_id": ["a", "b"], "tokenizer": "own", "corpus": "mine", "validity": "valid"} | shares
    )
    assert "1 of 2 runs" in _describe_lost_text(runs) and not _describe_lost_text(runs[:1])


def test_training_looks_at_long_words_in_pieces_and_at_other_text_as_it_is(tmp_path):
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = []
    for text in ("ordinary text\n" * 500, "日本、" * 900, "a" * 1000, ""):
        assert huggingface._cut_words(text, words, cuts) == [text] and not cuts
    for text in ("a" * 5000, "x " * 700 + "日" * 2500, " " * 3000 + "b", "\x1c=" * 2500):
        cut = huggingface._cut_words(text, words, [])
        assert "".join(cut) == text
        assert (
            max(last - first for piece in cut for _, (first, last) in words.pre_tokenize_str(piece))
            <= 1000
        )
    letters = random.Random(0).choices("abcdefghij", k=300_000)
    corpus = make_corpus(tmp_path / "c", ["".join(letters)])
    said = []
    settings = TokenizerSettings(name="b", kind="bpe", corpus="tiny", vocabulary_size=300)
    build(settings, tmp_path / "t", corpus, said.append)
    assert "299 times" in said[0]


def test_ordinary_text_trains_the_tokenizer_that_the_library_trains(tmp_path):
    texts = ["some ordinary text, and some more of it"] * 3 + ["123 " * 900]
    folder = make_tokenizer(tmp_path / "t", make_corpus(tmp_path / "c", texts), 290)
    expected = Tokenizer(models.BPE())
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    expected.train_from_iterator(texts, trainer)
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(expected.to_str())


def test_line_breaks_tabs_and_repeated_spaces_that_vanish_are_counted_apart(tmp_path):
    """Single spaces are not: words are often rejoined by them."""
    texts = ["the cat\n\n  sat\ton the mat", "the cat sat on the mat", "the\n\n\n\tcat\n sat"]
    accepting = made(words(), tmp_path / "words", settings={"accepted_loss": 0.5})
    split_at_blanks = load_tokenizer(accepting)
    found = measure(split_at_blanks, texts, corpus="c")
    assert found["lost_layout"] == 1.0 and found["lost"] == 0.0
    assert "100.00% of their line breaks" in describe(split_at_blanks, found)
    keeps_all = load_tokenizer(made(byte_level(), tmp_path / "bytes"))
    assert "lost_layout" not in measure(keeps_all, texts, corpus="c")
    assert "lost_layout" not in measure(split_at_blanks, texts[1:2], corpus="c")


@pytest.mark.parametrize(("line_breaks", "refused"), [(1, False), (6, True)])
def test_layout_above_the_accepted_share_of_the_bytes_is_refused(line_breaks, refused, tmp_path):
    """Below 5 % it is text with paragraphs, above it is code or a table."""
    tokenizer = load_tokenizer(made(words(), tmp_path / "words"))
    text = "the cat sat on the mat the cat sat on" + "\n" * line_breaks
    if not refused:
        assert measure(tokenizer, [text], corpus="c")["lost_layout"] == 1.0
        return
    with pytest.raises(UserError, match="loses the layout of this text") as error:
        measure(tokenizer, [text], corpus="c")
    assert f"{6 / len(text):.1%} of the bytes" in error.value.facts["found"]
    assert "accepted_loss: 0.2" in error.value.facts["next"]


CODE = "\n".join(["the", "\tcat", "\t\tsat"] * 9)


@pytest.mark.parametrize(
    ("text", "what"), [(CODE, "loses the layout"), ("the cat, 日本語", "loses ")]
)
def test_every_door_refuses_the_same_text_in_the_same_words(tmp_path, monkeypatch, text, what):
    folder = made(words(), tmp_path / "t")
    corpus = make_corpus(tmp_path / "c", [text], validation_share=0)
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text}))
    run = replace(
        make_run("padded", 16, global_batch=2),
        tokenizer=TokenizerSettings(name="own", kind="bpe", corpus="tiny", vocabulary_size=300),
        eos=True,
    )
    opened = SimpleNamespace(run=run, tokenizer=folder, name="c", positions=16)
    monkeypatch.setattr("tokenscale.cli.evaluate.open_checkpoint", lambda *_, **__: opened)
    monkeypatch.setattr("tokenscale.cli.generate.open_causal", lambda *_, **__: opened)
    monkeypatch.setattr(
        "tokenscale.cli.evaluate.held_out_pairs", lambda *_, **__: [Pair(0, text, text)]
    )
    doors = {
        form: functools.partial(
            write_store, StoreSettings(form, sequence_length=16), corpus, folder, tmp_path / form
        )
        for form in FORMATS
    }
    doors |= {
        "online": lambda: open_batches(run, Inputs(corpus, folder)),
        "evaluate a corpus": lambda: evaluate_text(tmp_path, str(corpus), split="train"),
        "evaluate a file": lambda: evaluate_text(tmp_path, str(lines)),
        "BLEU": lambda: evaluate_bleu(tmp_path, corpus=str(corpus), pairs=1),
        "generate": lambda: generate_texts(
            tmp_path, [text], max_new_tokens=1, sampling=Sampling(0, 0, 0, 0)
        ),
        "advise": lambda: advise(AdviceSettings(tokenizer_name=str(folder)), (str(lines),), print),
    }
    said = {}
    for name, enter in doors.items():
        with pytest.raises(UserError, match=what) as error:
            enter()
        said[name] = (error.value.what, error.value.facts["expected"])
    assert len(set(said.values())) == 1, said
