"""Tables of texts, as the page and the PDF show them, and as text, Markdown and LaTeX."""

import re
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

#: fewer rows are short enough with all their columns
FOLDED = 3


@dataclass(frozen=True)
class Table:
    """Table of columns, each with whether it is aligned to the right, and rows of texts."""

    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    caption: str = ""
    #: text of a cell → the URL to which it links, relative to the page
    links: dict[str, str] = field(default_factory=dict)


def columns(*names: str) -> list[tuple[str, bool]]:
    """Return columns of these names. A name that begins with `>` is aligned to the right."""
    return [(name.removeprefix(">"), name.startswith(">")) for name in names]


def fold_columns(table: Table, *names: str) -> Table:
    """Return the table without those of the named columns that have one value in all of at least
    `FOLDED` rows. The caption then says it.

    >>> table = Table(columns("run", ">steps"), [["a", "8"], ["b", "8"], ["c", "8"]], "Of one day.")
    >>> folded = fold_columns(table, "run", "steps")
    >>> folded.rows, folded.caption
    ([['a'], ['b'], ['c']], 'In all 3 rows: steps 8. Of one day.')
    """
    if len(table.rows) < FOLDED:
        return table
    kept = []
    folded = []
    for at, (name, _) in enumerate(table.columns):
        values = {row[at] for row in table.rows}
        if name in names and len(values) == 1:
            folded.append(f"{name} {values.pop()}")
        else:
            kept.append(at)
    if not folded:
        return table
    said = f"In all {len(table.rows)} rows: {', '.join(folded)}."
    return replace(
        table,
        columns=[table.columns[at] for at in kept],
        rows=[[row[at] for at in kept] for row in table.rows],
        caption=f"{said} {table.caption}".strip(),
    )


def count(value: Any) -> str:
    """Return a whole number as text; a dash if it is unknown."""
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
    """Return the table in GitHub's Markdown, with its caption below. Mark-up in cells is escaped.

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
    """Return the table for a terminal: two spaces between columns, the caption below.

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
    """Return the table in LaTeX, with the rules of the package booktabs, for `\\input` and
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
    """Escape a text for LaTeX.

    >>> print(in_latex("75 % of a_b"))
    75 \\% of a\\_b
    """
    return text.translate(_LATEX)
