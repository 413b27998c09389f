"""Vocabulary of the German–English grammar: German forms with their English translations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """German noun: gender (m, f, n), nominative singular and plural, and the English singular and plural."""

    gender: str
    singular: str
    plural: str
    english: str
    english_plural: str


@dataclass(frozen=True)
class Verb:
    """German verb: third person present (singular, plural), infinitive, past participle, separable prefix.

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
    rows = (line.split() for line in text.strip().splitlines())
    return tuple(_verb(row) for row in rows)


def _verb(row: list[str]) -> Verb:
    singular, plural, infinitive, participle, *english = row[:7]
    options = [word.strip("-") for word in row[7:]]
    return Verb(singular, plural, infinitive, participle, (english[0], english[1], english[2]), *options)


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
