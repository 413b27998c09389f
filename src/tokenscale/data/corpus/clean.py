"""What happens to each document before it is split. Everything changed or removed is counted."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator

from tokenscale.settings.data import CleaningSettings

#: every fate that is counted
FATES = (
    *("read", "no_text", "composed", "collapsed", "stripped", "not_unicode", "too_short", "too_long"),
    *("duplicates", "kept"),
)
_SPACES = re.compile(r"[^\S\n]+")
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


def clean(
    documents: Iterable[tuple[str | None, str]],
    settings: CleaningSettings,
    counts: dict[str, int],
    seen: set[bytes] | None = None,
) -> Iterator[tuple[str, str]]:
    """The documents (text, origin) that stay; `counts` is filled on the way, one number for each fate.

    Two calls that share `seen` drop what is a duplicate over both. A row without text (null) is dropped, and so is a
    text that is not Unicode (lone surrogates), which cannot be written as UTF-8. Duplicates are found by hash (32 bytes
    a document of memory, never the texts).
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
        if settings.deduplicate:
            digest = hashlib.sha256(encoded).digest()
            if digest in seen:
                counts["duplicates"] += 1
                continue
            seen.add(digest)
        counts["kept"] += 1
        yield text, origin


def collapse(text: str) -> str:
    """One space for each run of white space within a line, none at a line's ends, at most one empty line in a row.

    >>> collapse("a \\t b \\n\\n\\n\\n c")
    'a b\\n\\nc'
    """
    return _EMPTY_LINES.sub("\n\n", _LINE_ENDS.sub("\n", _SPACES.sub(" ", text)))
