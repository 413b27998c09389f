"""Source `grammar`: German sentences that a grammar makes up, each with its English translation.

For machines without a network: a translation that is no dictionary's, and that a small model can learn. German articles
and adjectives agree in gender, number and case; an object may stand first, told by its case alone; verbs stand second,
behind their object (perfect, modal verbs, subordinate clauses) or around it (separable prefixes). It is not natural
language: what a model reaches here says nothing of German.

A clause's combination is (subject's noun, verb, object's noun). A tenth of all combinations, by hash, is held out:
training sentences have none of them, and the main clause of a held-out sentence is one. Every word that a held-out
sentence needs occurs in training.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.corpus import grammar_words
from tokenscale.data.corpus.grammar_words import Noun, Verb
from tokenscale.data.corpus.raw_text import PAIR
from tokenscale.settings.data import SourceSettings
from tokenscale.settings.options import to_dict

#: equal settings give equal documents, now and later
KEEP_EARLIER = False
#: one combination in so many is held out
HELD_OUT = 10
#: sentences in a row that were there before: the grammar is used up
PATIENCE = 10_000

#: (gender or plural, case) → definite article; ending of the indefinite and of `mein`; of an adjective behind each
_FORMS = {
    ("m", "n"): ("der", "", "e", "er"),
    ("m", "a"): ("den", "en", "en", "en"),
    ("m", "d"): ("dem", "em", "en", "en"),
    ("f", "n"): ("die", "e", "e", "e"),
    ("f", "a"): ("die", "e", "e", "e"),
    ("f", "d"): ("der", "er", "en", "en"),
    ("n", "n"): ("das", "", "e", "es"),
    ("n", "a"): ("das", "", "e", "es"),
    ("n", "d"): ("dem", "em", "en", "en"),
    ("p", "n"): ("die", "e", "en", "en"),
    ("p", "a"): ("die", "e", "en", "en"),
    ("p", "d"): ("den", "en", "en", "en"),
}

Item = TypeVar("Item")


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """The settings, for the manifest."""
    return {"kind": "grammar", "settings": to_dict(source)}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """(pair, origin) of each training document, no two alike.

    Raises UserError where the grammar has no more sentences, and at the end where they are too few to hold every word
    that a held-out sentence may have.
    """
    missing = set(_list_content_words())
    count = min(source.documents, source.maximum_documents or source.documents)
    for number, (text, used) in enumerate(_generate_sentences(source.seed, count, held_out=False)):
        missing -= used
        yield text, f"grammar::{number}"
    if missing:
        raise UserError(
            "so few sentences do not hold every word of the grammar.",
            key="corpus.source.documents",
            found=f"{count:,} sentences without {len(missing)} of {len(_list_content_words())} words",
            missing=", ".join(sorted(missing)[:8]),
            next="raise documents: 2000 hold them all",
        )


def validation_documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """(pair, origin) of each held-out document, no two alike."""
    for number, (text, _) in enumerate(_generate_sentences(source.seed + 1_000_003, source.held_out, held_out=True)):
        yield text, f"grammar-held-out::{number}"


def is_held_out(subject: Noun, verb: Verb, noun: Noun) -> bool:
    """Whether a clause of these is kept out of training; the same for every seed."""
    digest = hashlib.sha256("|".join((subject.singular, verb.participle, noun.singular)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def _list_content_words() -> frozenset[str]:
    """Every content word, by its German entry."""
    nouns = (noun.singular for noun in (*grammar_words.PERSONS, *grammar_words.THINGS))
    verbs = (verb.infinitive for verb in (*grammar_words.OF_THINGS, *grammar_words.OF_PERSONS))
    return frozenset([*nouns, *verbs, *grammar_words.ADJECTIVES, *grammar_words.ADVERBS])


def _generate_sentences(seed: int, count: int, *, held_out: bool) -> Iterator[tuple[str, frozenset[str]]]:
    """(pair, its content words) of so many sentences."""
    draw, failed = _Draw(seed), 0
    seen: set[str] = set()
    while len(seen) < count:
        german, english, used = _draw_sentence(draw, held_out)
        text = f"{_capitalise(german)}{PAIR}{_capitalise(english)}"
        if text in seen:
            failed += 1
            if failed == PATIENCE:
                raise UserError(
                    "the grammar has no more sentences.",
                    key="corpus.source.documents",
                    found=f"{len(seen):,} sentences",
                    next="ask for fewer documents",
                )
            continue
        failed = 0
        seen.add(text)
        yield text, used


class _Draw:
    """Choices from a raw stream of bits, which is fixed for all versions of NumPy."""

    def __init__(self, seed: int):
        self._bits = np.random.PCG64(seed)

    def below(self, count: int) -> int:
        """A number from 0 to count - 1; the remainder's bias is below count / 2**32."""
        return (int(self._bits.random_raw()) >> 32) % count

    def of(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def one_in(self, count: int) -> bool:
        return self.below(count) == 0


@dataclass(frozen=True)
class _Phrase:
    """A noun with its article and perhaps an adjective: `gender` is p in the plural."""

    noun: Noun
    plural: bool
    article: str  # definite, indefinite, mine
    adjective: str | None

    @property
    def gender(self) -> str:
        return "p" if self.plural else self.noun.gender

    def german(self, case: str) -> str:
        definite, ending, behind_definite, behind_other = _FORMS[self.gender, case]
        stem = {"indefinite": "ein", "mine": "mein"}.get(self.article)
        article = definite if stem is None else stem + ending
        noun = self.noun.plural if self.plural else self.noun.singular
        if self.plural and case == "d" and not noun.endswith(("n", "s")):
            noun += "n"
        adjective = self.adjective and self.adjective + (behind_definite if stem is None else behind_other)
        return " ".join(filter(None, (article, adjective, noun)))

    def english(self) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        rest = " ".join(filter(None, (self.adjective and grammar_words.ADJECTIVES[self.adjective], noun)))
        indefinite = "an" if rest[0] in "aeiou" else "a"
        return f"{ {'indefinite': indefinite, 'mine': 'my'}.get(self.article, 'the') } {rest}"

    @property
    def told_by_case(self) -> bool:
        """Whether it can stand before the subject and still be known as an object."""
        return self.gender == "m"


def _draw_phrase(draw: _Draw, noun: Noun) -> _Phrase:
    plural = draw.one_in(4)
    article = draw.of(("definite", "mine") if plural else ("definite", "indefinite", "mine"))
    return _Phrase(noun, plural, article, draw.of(list(grammar_words.ADJECTIVES)) if draw.one_in(2) else None)


@dataclass(frozen=True)
class _Clause:
    subject: _Phrase
    verb: Verb
    object: _Phrase
    tense: str  # present, perfect, modal
    modal: tuple[str, str, str]

    def german(self, first: str | None, *, verb_last: bool = False) -> str:
        """A clause behind `first`, which stands before the verb (None: the subject does; "object": the object)."""
        subject, noun = self.subject.german("n"), self.object.german(self.verb.case)
        plural = self.subject.plural
        if self.tense == "present":
            finite, rest = (self.verb.plural if plural else self.verb.singular), self.verb.prefix
        elif self.tense == "perfect":
            finite, rest = "haben" if plural else "hat", self.verb.participle
        else:
            finite, rest = self.modal[plural], self.verb.infinitive
        if verb_last:
            end = rest + finite if self.tense == "present" else f"{rest} {finite}"
            return f"{subject} {noun} {end}"
        if first is None:
            parts: tuple[str, ...] = (subject, finite, noun, rest)
        elif first == "object":
            parts = (noun, finite, subject, rest)
        else:
            parts = (first, finite, subject, noun, rest)
        return " ".join(filter(None, parts))

    def english(self) -> str:
        singular, plain, participle = self.verb.english
        if self.tense == "present":
            verb = plain if self.subject.plural else singular
        elif self.tense == "perfect":
            verb = f"{'have' if self.subject.plural else 'has'} {participle}"
        else:
            verb = f"{self.modal[2]} {plain}"
        return f"{self.subject.english()} {verb} {self.object.english()}"

    @property
    def used(self) -> set[str]:
        adjectives = {phrase.adjective for phrase in (self.subject, self.object) if phrase.adjective}
        return {self.subject.noun.singular, self.object.noun.singular, self.verb.infinitive} | adjectives


def _draw_clause(draw: _Draw, held_out: bool) -> _Clause:
    while True:
        subject = draw.of(grammar_words.PERSONS)
        verbs, nouns = draw.of(
            ((grammar_words.OF_THINGS, grammar_words.THINGS), (grammar_words.OF_PERSONS, grammar_words.PERSONS))
        )
        verb, noun = draw.of(verbs), draw.of(nouns)
        if noun is not subject and is_held_out(subject, verb, noun) == held_out:
            break
    tense, modal = draw.of(("present", "present", "perfect", "modal")), draw.of(grammar_words.MODALS)
    return _Clause(_draw_phrase(draw, subject), verb, _draw_phrase(draw, noun), tense, modal)


def _draw_sentence(draw: _Draw, held_out: bool) -> tuple[str, str, frozenset[str]]:
    """German, English and content words of a sentence: a clause, and sometimes a subordinate one."""
    main = _draw_clause(draw, held_out)
    german, english, used = main.german(None), main.english(), main.used
    if draw.one_in(3):
        adverb = draw.of(list(grammar_words.ADVERBS))
        german, english, used = main.german(adverb), f"{grammar_words.ADVERBS[adverb]} {english}", used | {adverb}
    elif main.object.told_by_case and draw.one_in(2):
        german = main.german("object")
    if draw.one_in(4):
        conjunction, other = draw.of(list(grammar_words.CONJUNCTIONS)), _draw_clause(draw, held_out=False)
        german += f", {conjunction} {other.german(None, verb_last=True)}"
        english += f" {grammar_words.CONJUNCTIONS[conjunction]} {other.english()}"
        used = used | other.used
    return german, english, frozenset(used)


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:] + "."
