"""Tables of texts, as the page and the PDF show them, and as text, Markdown and LaTeX."""

import re
import textwrap
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pandas as pd


class Link(str):
    """A cell's text that leads to a file."""

    href: str = ""

    @classmethod
    def to(cls, text: str, path: str) -> "Link":
        """The text with its target, as seen from the folder of the page; `path` is seen from the
        project's folder.
        """
        link = cls(text)
        link.href = quote(f"../../{path}")
        return link


@dataclass(frozen=True)
class Table:
    """Columns with a flag for those aligned to the right, and rows of texts, of which some may be
    links.
    """

    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    caption: str = ""


def columns(*names: str) -> list[tuple[str, bool]]:
    """Columns of these names; one that begins with `>` is aligned to the right."""
    return [(name.removeprefix(">"), name.startswith(">")) for name in names]


def count(value: Any) -> str:
    """A whole number as text; a dash where it is not known."""
    return "–" if pd.isna(value) else str(int(value))


#: what LaTeX reads as commands, and signs that its fonts may lack; `[` would belong to the end of
#: the row before
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "[": "{[}",
        "\u202f": r"\,",
        "\u00a0": "~",
        "−": "$-$",
        "–": "--",
        "×": r"$\times$",
        "±": r"$\pm$",
        "≤": r"$\le$",
        "≥": r"$\ge$",
        "→": r"$\to$",
        "∞": r"$\infty$",
        "µ": r"\textmu{}",
        "“": "``",
        "”": "''",
        "\n": " ",
    }
)


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown, its caption below. What a cell holds is text: it makes no
    mark-up of its own.

    >>> print(markdown(Table([("run", False), ("loss", True)], [["a|b", "1"]])), end="")
    | run | loss |
    | :-- | --: |
    | a\\|b | 1 |
    """
    heads, *rows = (
        [_markdown(text) for text in row]
        for row in ([name for name, _ in table.columns], *table.rows)
    )
    rules = ["--:" if right else ":--" for _, right in table.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
    return "\n".join(lines + (["", _markdown(table.caption)] if table.caption else [])) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*\[\]<&|])", r"\\\1", text.replace("\n", " "))


def plain(table: Table) -> str:
    """The table for a terminal: columns parted by two spaces, the caption below.

    >>> print(plain(Table([("run", False), ("loss", True)], [["a", "1"], ["b", "12"]])), end="")
    run  loss
    a       1
    b      12
    """
    rows = [[name for name, _ in table.columns], *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    sides = [">" if right else "<" for _, right in table.columns]
    lines = ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]
    return (
        "\n".join([*lines, *(["", *textwrap.wrap(table.caption, 100)] if table.caption else [])])
        + "\n"
    )


def latex(table: Table, label: str) -> str:
    """The table in LaTeX, with the rules of the package booktabs; for `\\input`, and to be named by
    `\\ref{label}`.

    >>> print(latex(Table([("run", False), ("%", True)], [["a_b", "1"]]), "tab:x").splitlines()[5])
    a\\_b & 1 \\\\
    """
    heads, *rows = (
        " & ".join(map(in_latex, row)) for row in ([name for name, _ in table.columns], *table.rows)
    )
    sides = "".join("r" if right else "l" for _, right in table.columns)
    lines = [
        *(
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            rf"{heads} \\ \midrule",
        ),
        *(rf"{row} \\" for row in rows),
        *(r"\bottomrule", r"\end{tabular}"),
        *([rf"\caption{{{in_latex(table.caption)}}}"] if table.caption else []),
        *(rf"\label{{{re.sub(r'[^A-Za-z0-9:-]', '-', label)}}}", r"\end{table}"),
    ]
    return "\n".join(lines) + "\n"


def in_latex(text: str) -> str:
    """Text as LaTeX prints it.

    >>> print(in_latex("75 % of a_b"))
    75 \\% of a\\_b
    """
    return text.translate(_LATEX)
