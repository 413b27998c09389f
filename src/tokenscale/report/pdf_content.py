"""What a page of a PDF shows, however a program numbers, packs and cuts the objects that it is made of."""

import hashlib
import json
import re
from typing import Any

from pypdf.generic import ArrayObject, DictionaryObject, IndirectObject, StreamObject

#: keys of a PDF's objects that cutting and saving may change
_LOOSE = {
    "/Parent",
    "/P",
    "/Length",
    "/Filter",
    "/DecodeParms",
    "/StructParents",
    "/Tabs",
    "/Metadata",
    "/LastModified",
}


def content(page: Any) -> str:
    """Digest of what a page shows: its decoded drawing commands, and all fonts, images and notes that it uses.

    How the file numbers and compresses its objects does not matter.
    """
    return hashlib.sha256(json.dumps(_plain(page, frozenset()), sort_keys=True).encode()).hexdigest()


def shown(page: Any) -> str:
    """Return the digest of a page's drawing commands and of the forms and images that they use.

    Fonts are left out: pages of one document share them, and a letter that is new on one page changes them for all.
    """
    commands = page.get_contents().get_data()
    forms = page["/Resources"].get("/XObject", {})
    used = {f"/{name.decode('latin-1')}" for name in re.findall(rb"/(\S+)\s+Do\b", commands)}
    plain = {name: _plain(forms.raw_get(name), frozenset()) for name in sorted(used & set(forms))}
    plain |= {key: _plain(page.raw_get(key), frozenset()) for key in sorted({"/MediaBox", "/Annots"} & set(page))}
    return hashlib.sha256(commands + json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _plain(value: Any, above: frozenset[int]) -> Any:
    if isinstance(value, IndirectObject):
        if value.idnum in above:
            return "↑"
        return _plain(value.get_object(), above | {value.idnum})
    if isinstance(value, StreamObject):
        stream = hashlib.sha256(value.get_data()).hexdigest()
        return {"stream": stream, **_entries(value, above)}
    if isinstance(value, DictionaryObject):
        return _entries(value, above)
    if isinstance(value, ArrayObject):
        return [_plain(item, above) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, (int, float)) else str(value)


def _entries(value: Any, above: frozenset[int]) -> dict[str, Any]:
    return {key: _plain(value.raw_get(key), above) for key in sorted(value) if key not in _LOOSE}
