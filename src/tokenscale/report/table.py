"""Tables of texts, as the page and the PDF show them."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pandas as pd


class Link(str):
    """A cell's text that leads to a file, named as seen from the project's folder."""

    href: str = ""

    @classmethod
    def to(cls, text: str, path: str) -> "Link":
        """The text with its target, as seen from the folder of the page (`results/report/`)."""
        link = cls(text)
        link.href = quote(f"../../{path}")
        return link


@dataclass(frozen=True)
class Table:
    """Columns with a flag for those aligned to the right, and rows of texts, of which some may be links."""

    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    caption: str = ""


def count(value: Any) -> str:
    """A whole number as text; a dash where it is not known."""
    return "–" if pd.isna(value) else str(int(value))
