"""What happens to each document before it is split. Everything changed or removed is counted."""

import hashlib
from collections.abc import Iterable, Iterator

from tokenscale.settings.data import CleaningSettings


def clean(
    documents: Iterable[tuple[str, str]], settings: CleaningSettings, counts: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """The documents (text, origin) that stay; `counts` is filled on the way, one number for each fate.

    A text that is not Unicode (lone surrogates) cannot be written as UTF-8 and is dropped. Duplicates are found by
    hash (32 bytes a document of memory, never the texts).
    """
    for name in ("read", "stripped", "not_unicode", "too_short", "too_long", "duplicates", "kept"):
        counts.setdefault(name, 0)
    seen: set[bytes] = set()
    for text, origin in documents:
        counts["read"] += 1
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
