"""An SVG file → a piece of an HTML page: no outside reference, colours of the page, ids that clash with no other's."""

import re
from html import escape

from tokenscale.report.style import GRID, PALETTE, TEXT


def inline(svg: str, prefix: str, alt: str) -> str:
    """The `<svg>` element of a figure for inlining; `prefix` is put before each id, `alt` is read aloud."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<title>.*?</title>", "", svg, flags=re.DOTALL
    )
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)[1]
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(re.escape(TEXT), "currentColor", body, flags=re.IGNORECASE)
    for i, colour in enumerate((GRID, *PALETTE)):
        body = re.sub(re.escape(colour), f"var(--c{i})", body, flags=re.IGNORECASE)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}">{body.strip()}'
