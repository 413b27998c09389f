"""The made-up corpus: what is held out is unseen, what it is made of is not, and its German is German."""

import re

import pytest

from tokenscale.base.errors import UserError
from tokenscale.data.corpus import grammar
from tokenscale.data.corpus import grammar_words as words
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.settings.data import CorpusSettings, SourceSettings

SOURCE = SourceSettings("grammar", documents=3000, held_out=300)


def pairs(documents):
    return [tuple(text.split(PAIR)) for text, _ in documents]


@pytest.fixture(scope="module")
def training():
    return pairs(grammar.documents(SOURCE))


@pytest.fixture(scope="module")
def held_out():
    return pairs(grammar.validation_documents(SOURCE))


def test_equal_settings_give_equal_sentences_and_seeds_other_ones(training):
    assert pairs(grammar.documents(SOURCE)) == training and len(set(training)) == 3000
    other = SourceSettings("grammar", documents=3000, seed=1)
    assert len(set(pairs(grammar.documents(other))) & set(training)) < 100


def test_no_held_out_sentence_is_trained_on_and_all_of_its_words_are(training, held_out):
    assert len(held_out) == 300 and not set(held_out) & set(training)
    for side in (0, 1):
        assert not {pair[side] for pair in held_out} & {pair[side] for pair in training}
    seen, asked = (set(re.findall(r"\w+", " ".join(b for _, b in made).lower())) for made in (training, held_out))
    assert asked <= seen


def test_no_training_clause_is_of_a_combination_that_is_held_out(held_out):
    """Read off the sentences' own words: subject, verb and object of a main clause in English."""
    plain = [en for _, en in held_out if " because " not in en and " when " not in en]
    assert plain
    kept = {
        (subject.english, verb.english, noun.english)
        for subject in words.PERSONS
        for verbs, nouns in ((words.OF_THINGS, words.THINGS), (words.OF_PERSONS, words.PERSONS))
        for verb in verbs
        for noun in nouns
        if grammar.is_held_out(subject, verb, noun)
    }
    number = {noun.english_plural: noun.english for noun in (*words.PERSONS, *words.THINGS)}
    forms = {form: verb.english for verb in (*words.OF_THINGS, *words.OF_PERSONS) for form in verb.english}
    for text in plain:
        found = re.findall(r"\w+", re.split(r" although | while ", text)[0].lower())
        nouns = [number.get(w, w) for w in found if number.get(w, w) in number.values()]
        verb = next(forms[w] for w in found if w in forms)
        assert (nouns[0], verb, nouns[1]) in kept, text


def test_every_word_of_the_grammar_occurs_in_training_or_it_is_refused(training):
    text = " ".join(de for de, _ in training).lower()
    for noun in (*words.PERSONS, *words.THINGS):
        assert noun.singular.lower() in text
    assert all(word.lower() in text for word in (*words.ADJECTIVES, *words.ADVERBS))
    with pytest.raises(UserError, match="do not hold every word") as error:
        list(grammar.documents(SourceSettings("grammar", documents=40)))
    assert "raise documents" in error.value.render()


@pytest.mark.parametrize(
    "gender, case, article, expected",
    [
        ("m", "n", "definite", "der alte Hund"),
        ("m", "a", "definite", "den alten Hund"),
        ("m", "d", "indefinite", "einem alten Hund"),
        ("m", "n", "mine", "mein alter Hund"),
        ("f", "d", "definite", "der alten Katze"),
        ("f", "n", "indefinite", "eine alte Katze"),
        ("n", "a", "indefinite", "ein altes Kind"),
        ("p", "d", "definite", "den alten Kindern"),
        ("p", "a", "mine", "meine alten Kinder"),
    ],
)
def test_articles_and_adjectives_agree(gender, case, article, expected):
    nouns = {noun.singular: noun for noun in words.PERSONS}
    noun = nouns[{"m": "Hund", "f": "Katze", "n": "Kind", "p": "Kind"}[gender]]
    assert grammar._Phrase(noun, gender == "p", article, "alt").german(case) == expected


@pytest.mark.parametrize(
    "tense, first, last, expected",
    [
        ("present", None, False, "die Frau ruft den Koch an"),
        ("present", "heute", False, "heute ruft die Frau den Koch an"),
        ("present", "object", False, "den Koch ruft die Frau an"),
        ("present", None, True, "die Frau den Koch anruft"),
        ("perfect", None, False, "die Frau hat den Koch angerufen"),
        ("perfect", None, True, "die Frau den Koch angerufen hat"),
        ("modal", "heute", False, "heute kann die Frau den Koch anrufen"),
    ],
)
def test_verbs_stand_second_and_last(tense, first, last, expected):
    nouns = {noun.singular: noun for noun in words.PERSONS}
    verb = next(v for v in words.OF_PERSONS if v.infinitive == "anrufen")
    woman, cook = (grammar._Phrase(nouns[name], False, "definite", None) for name in ("Frau", "Koch"))
    clause = grammar._Clause(woman, verb, cook, tense, words.MODALS[0])
    assert clause.german(first, verb_last=last) == expected
    assert clause.english() in (
        "the woman phones the cook",
        "the woman has phoned the cook",
        "the woman can phone the cook",
    )


def test_a_corpus_of_it_brings_its_own_held_out_pairs(tmp_path):
    source = SourceSettings("grammar", documents=1000, held_out=50)
    manifest = build(CorpusSettings(name="made-up", source=source), tmp_path)
    assert manifest["pairs"] is True and manifest["source"]["kind"] == "grammar"
    assert len(RawText(tmp_path, "train")) == 1000 and len(RawText(tmp_path, "validation")) == 50


def test_options_of_other_kinds_are_refused_and_the_kind_is_implied():
    assert SourceSettings("dummy", documents=5, held_out=3).problems() == [
        ("held_out", "has no meaning for kind dummy")
    ]
    assert SourceSettings.infer_kind({"documents": 5, "held_out": 3}) == "grammar"
