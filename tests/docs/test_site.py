"""The built documentation site (`make docs`): every link within it resolves."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

SITE = Path(__file__).parents[2] / "docs/_build/html"


def broken(page: Path) -> list[str]:
    """The links, pictures, scripts and style sheets of a page whose file or anchor is missing."""
    found = []
    text = page.read_text(encoding="utf-8")
    for target in {
        unescape(t)
        for t in re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]+)"', text)
    }:
        if re.match(r"(https?|mailto|data):", target):
            continue
        path, anchor = urldefrag(target)
        file = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
        if not file.is_file() or (
            anchor
            and file.suffix == ".html"
            and f'id="{unquote(anchor)}"' not in file.read_text(encoding="utf-8")
        ):
            found.append(target)
    return sorted(found)


def test_every_link_of_the_site_resolves():
    if not SITE.is_dir():
        pytest.fail("the site is not built; run `make docs` first")
    pages = sorted(SITE.glob("*.html"))
    assert len(pages) > 12
    assert {page.name: found for page in pages if (found := broken(page))} == {}
