"""Generate German sentences with their English translations: the corpus `grammar` of config.yaml.

    python config/corpora/grammar/generate.py FOLDER

writes train.parquet (4,000 pairs) and validation.parquet (500 pairs). The files beside this script
are its output, byte for byte, with the version of pyarrow that they name.

A small model can learn this translation task, and a dictionary cannot solve it. German articles and
adjectives agree in gender, number and case. An object may come first, marked by its case alone.
Verbs come second, after their object (perfect, modal verbs, subordinate clauses) or around it
(separable prefixes). This is not natural language: scores on it say nothing about German.

The combination of a clause is (subject noun, verb, object noun). A tenth of all combinations,
chosen by hash, is held out: no training sentence contains one, and the main clause of every
held-out sentence is one. Every word of a held-out sentence occurs in training.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: split → (pairs, seed)
SPLITS = {"train": (4000, 0), "validation": (500, 1_000_003)}
#: one combination in HELD_OUT is held out
HELD_OUT = 10

#: (gender or plural, case) → definite article, ending of `ein` and `mein`, adjective endings after
#: each of the two
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


@dataclass(frozen=True)
class Noun:
    """German noun: gender (m, f, n), nominative singular and plural, and the English singular and
    plural.
    """

    gender: str
    singular: str
    plural: str
    english: str
    english_plural: str


@dataclass(frozen=True)
class Verb:
    """German verb: third person present (singular, plural), infinitive, past participle, separable
    prefix.

    `case` is the case of the object: accusative (a) or dative (d).
    """

    singular: str
    plural: str
    infinitive: str
    participle: str
    english: tuple[str, str, str]  # singular, plural and infinitive, participle
    case: str = "a"
    prefix: str = ""


def _nouns(text: str) -> tuple[Noun, ...]:
    return tuple(Noun(*line.split()) for line in text.strip().splitlines())


def _verbs(text: str) -> tuple[Verb, ...]:
    return tuple(_verb(line.split()) for line in text.strip().splitlines())


def _verb(row: list[str]) -> Verb:
    singular, plural, infinitive, participle, *english = row[:7]
    options = [word.strip("-") for word in row[7:]]
    return Verb(
        singular, plural, infinitive, participle, (english[0], english[1], english[2]), *options
    )


#: persons: subjects, and objects of some verbs
PERSONS = _nouns("""
m Lehrer Lehrer teacher teachers
m Arzt Ärzte doctor doctors
m Bruder Brüder brother brothers
m Freund Freunde friend friends
m Gärtner Gärtner gardener gardeners
m Onkel Onkel uncle uncles
m Koch Köche cook cooks
f Frau Frauen woman women
f Schwester Schwestern sister sisters
f Tochter Töchter daughter daughters
f Königin Königinnen queen queens
f Tante Tanten aunt aunts
f Sängerin Sängerinnen singer singers
n Kind Kinder child children
n Mädchen Mädchen girl girls
n Pferd Pferde horse horses
m Hund Hunde dog dogs
f Katze Katzen cat cats
""")
#: things: objects only
THINGS = _nouns("""
m Apfel Äpfel apple apples
m Brief Briefe letter letters
m Tisch Tische table tables
m Schlüssel Schlüssel key keys
m Koffer Koffer suitcase suitcases
m Garten Gärten garden gardens
f Blume Blumen flower flowers
f Tasse Tassen cup cups
f Lampe Lampen lamp lamps
f Brücke Brücken bridge bridges
f Zeitung Zeitungen newspaper newspapers
f Tür Türen door doors
n Buch Bücher book books
n Haus Häuser house houses
n Bild Bilder picture pictures
n Fenster Fenster window windows
n Messer Messer knife knives
n Kleid Kleider dress dresses
""")
#: verbs whose object is a thing; the last column is the prefix that is separated in a main clause
OF_THINGS = _verbs("""
kauft kaufen kaufen gekauft buys buy bought
verkauft verkaufen verkaufen verkauft sells sell sold
findet finden finden gefunden finds find found
zeichnet zeichnen zeichnen gezeichnet draws draw drawn
bringt bringen bringen gebracht brings bring brought
putzt putzen putzen geputzt cleans clean cleaned
braucht brauchen brauchen gebraucht needs need needed
verliert verlieren verlieren verloren loses lose lost
macht machen aufmachen aufgemacht opens open opened a auf-
stellt stellen abstellen abgestellt drops drop dropped a ab-
sieht sehen ansehen angesehen examines examine examined a an-
holt holen abholen abgeholt collects collect collected a ab-
""")
#: verbs whose object is a person, some of them in the dative
OF_PERSONS = _verbs("""
liebt lieben lieben geliebt loves love loved
sucht suchen suchen gesucht seeks seek sought
kennt kennen kennen gekannt knows know known
hört hören hören gehört hears hear heard
besucht besuchen besuchen besucht visits visit visited
fragt fragen fragen gefragt asks ask asked
ruft rufen anrufen angerufen phones phone phoned a an-
lädt laden einladen eingeladen invites invite invited a ein-
hilft helfen helfen geholfen helps help helped d
dankt danken danken gedankt thanks thank thanked d
antwortet antworten antworten geantwortet answers answer answered d
hört hören zuhören zugehört heeds heed heeded d zu-
""")
#: adjectives whose stem does not change
ADJECTIVES = dict(
    line.split()
    for line in """
alt old
jung young
klein small
groß big
schön beautiful
neu new
rot red
blau blue
grün green
stark strong
reich rich
arm poor
ruhig quiet
schnell quick
kalt cold
freundlich friendly
""".strip().splitlines()
)
#: adverbials that can come before the verb; the subject then follows the verb
ADVERBS = {
    "heute": "today",
    "morgen": "tomorrow",
    "oft": "often",
    "jetzt": "now",
    "manchmal": "sometimes",
    "am Abend": "in the evening",
    "im Sommer": "in summer",
    "nach dem Essen": "after the meal",
}
#: modal verbs: German singular, German plural, English
MODALS = (("kann", "können", "can"), ("muss", "müssen", "must"), ("soll", "sollen", "should"))
#: subordinating conjunctions: the clause ends with its verb
CONJUNCTIONS = {"weil": "because", "wenn": "when", "obwohl": "although", "während": "while"}


def is_held_out(subject: Noun, verb: Verb, noun: Noun) -> bool:
    """Return whether this combination is held out of training. Independent of the seed."""
    digest = hashlib.sha256(
        "|".join((subject.singular, verb.participle, noun.singular)).encode()
    ).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def generate_pairs(count: int, seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield `count` distinct pairs (German, English)."""
    draw = _Draw(seed)
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        german, english = _draw_sentence(draw, held_out)
        pair = _capitalise(german), _capitalise(english)
        if pair not in seen:
            seen.add(pair)
            yield pair


class _Draw:
    """Random choices from a raw bit stream, which is fixed across NumPy versions."""

    def __init__(self, seed: int):
        self._bits = np.random.PCG64(seed)

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1, with a bias below count / 2**32."""
        return (int(self._bits.random_raw()) >> 32) % count

    def choice(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def one_in(self, count: int) -> bool:
        return self.below(count) == 0


@dataclass(frozen=True)
class _Phrase:
    """Noun phrase: article, optional adjective, noun. `gender` is p in the plural."""

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
        adjective = self.adjective and self.adjective + (
            behind_definite if stem is None else behind_other
        )
        return " ".join(filter(None, (article, adjective, noun)))

    def english(self) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        rest = " ".join(filter(None, (self.adjective and ADJECTIVES[self.adjective], noun)))
        indefinite = "an" if rest[0] in "aeiou" else "a"
        return f"{ {'indefinite': indefinite, 'mine': 'my'}.get(self.article, 'the') } {rest}"

    @property
    def is_marked_by_case(self) -> bool:
        """Whether the case form identifies the phrase as an object even before the subject."""
        return self.gender == "m"


def _draw_phrase(draw: _Draw, noun: Noun) -> _Phrase:
    plural = draw.one_in(4)
    article = draw.choice(("definite", "mine") if plural else ("definite", "indefinite", "mine"))
    return _Phrase(noun, plural, article, draw.choice(list(ADJECTIVES)) if draw.one_in(2) else None)


@dataclass(frozen=True)
class _Clause:
    subject: _Phrase
    verb: Verb
    object: _Phrase
    tense: str  # present, perfect, modal
    modal: tuple[str, str, str]

    def german(self, first: str | None, *, verb_last: bool = False) -> str:
        """Return the German clause. `first` precedes the verb; None means the subject, "object" the
        object.
        """
        subject = self.subject.german("n")
        noun = self.object.german(self.verb.case)
        plural = self.subject.plural
        if self.tense == "present":
            finite = self.verb.plural if plural else self.verb.singular
            rest = self.verb.prefix
        elif self.tense == "perfect":
            finite = "haben" if plural else "hat"
            rest = self.verb.participle
        else:
            finite = self.modal[plural]
            rest = self.verb.infinitive
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


def _draw_clause(draw: _Draw, held_out: bool) -> _Clause:
    while True:
        subject = draw.choice(PERSONS)
        verbs, nouns = draw.choice(((OF_THINGS, THINGS), (OF_PERSONS, PERSONS)))
        verb = draw.choice(verbs)
        noun = draw.choice(nouns)
        if noun is not subject and is_held_out(subject, verb, noun) == held_out:
            break
    tense = draw.choice(("present", "present", "perfect", "modal"))
    modal = draw.choice(MODALS)
    return _Clause(_draw_phrase(draw, subject), verb, _draw_phrase(draw, noun), tense, modal)


def _draw_sentence(draw: _Draw, held_out: bool) -> tuple[str, str]:
    """Return (German, English) of a main clause, sometimes with a subordinate clause."""
    main = _draw_clause(draw, held_out)
    german = main.german(None)
    english = main.english()
    if draw.one_in(3):
        adverb = draw.choice(list(ADVERBS))
        german = main.german(adverb)
        english = f"{ADVERBS[adverb]} {english}"
    elif main.object.is_marked_by_case and draw.one_in(2):
        german = main.german("object")
    if draw.one_in(4):
        conjunction = draw.choice(list(CONJUNCTIONS))
        other = _draw_clause(draw, held_out=False)
        german += f", {conjunction} {other.german(None, verb_last=True)}"
        english += f" {CONJUNCTIONS[conjunction]} {other.english()}"
    return german, english


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def write(folder: Path) -> None:
    """Write the file of each split."""
    for split, (count, seed) in SPLITS.items():
        german, english = zip(
            *generate_pairs(count, seed, held_out=split == "validation"), strict=True
        )
        table = pa.table({"german": german, "english": english})
        pq.write_table(table, folder / f"{split}.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
