"""Cleaning of documents before the split. Every change and removal is counted."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenscale.settings.data import CleaningSettings

#: outcomes and changes that are counted
FATES = (
    *("read", "no_text", "composed", "collapsed", "stripped", "not_unicode", "too_short", "too_long"),
    *("duplicates", "kept"),
)
_SPACES = re.compile(r"[^\S\n]+")
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


class Document(NamedTuple):
    """A cleaned document: its text, where it comes from, its UTF-8 bytes and their SHA-256."""

    text: str
    origin: str
    encoded: bytes
    sha256: bytes


def clean(
    documents: Iterable[tuple[str | None, str]],
    settings: CleaningSettings,
    counts: dict[str, int],
    seen: set[bytes] | None = None,
) -> Iterator[Document]:
    """Yield the cleaned documents and add to `counts`, one number per outcome in `FATES`.

    Calls that share `seen` also drop duplicates across calls. Null texts are dropped, as are texts with lone
    surrogates, which cannot be encoded as UTF-8. Duplicates are found by the first 128 bits of their SHA-256: memory
    holds about 100 bytes per document, not the texts. A corpus of many documents is built in parts (see `parts`).
    """
    for name in FATES:
        counts.setdefault(name, 0)
    seen = set() if seen is None else seen
    for text, origin in documents:
        counts["read"] += 1
        if text is None:
            counts["no_text"] += 1
            continue
        if settings.nfc and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            counts["composed"] += 1
        if settings.collapse:
            collapsed = collapse(text)
            counts["collapsed"] += collapsed != text
            text = collapsed
        if settings.strip:
            stripped = text.strip()
            counts["stripped"] += stripped != text
            text = stripped
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            counts["not_unicode"] += 1
            continue
        if len(text) < settings.minimum_characters:
            counts["too_short"] += 1
            continue
        if settings.maximum_characters is not None and len(text) > settings.maximum_characters:
            counts["too_long"] += 1
            continue
        sha256 = hashlib.sha256(encoded).digest()
        if settings.deduplicate:
            if sha256[:16] in seen:
                counts["duplicates"] += 1
                continue
            seen.add(sha256[:16])
        counts["kept"] += 1
        yield Document(text, origin, encoded, sha256)


def collapse(text: str) -> str:
    """Collapse white space: one space within a line, none at line ends, at most one empty line in a row."""
    return _EMPTY_LINES.sub("\n\n", _LINE_ENDS.sub("\n", _SPACES.sub(" ", text)))
