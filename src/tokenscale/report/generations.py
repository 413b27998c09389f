"""What trained models wrote behind prompts, as a table: text that is shown as text, whatever it holds."""

import pandas as pd

from tokenscale.report.style import number
from tokenscale.report.table import Table, count

#: signs that end a line, in place of which one is shown; and what stands for a sign that cannot be printed
_NEWLINE, _UNPRINTABLE = "↵", "\ufffd"


def table(generations: pd.DataFrame) -> Table:
    """A row an answer of `generations.sql`: prompt, text, how it was chosen, its tokens, model and steps."""
    columns = [("prompt", False), ("text behind it", False), ("sampling", False), ("tokens", True)]
    columns += [("model", False), ("steps", True), ("run", False)]
    rows = [
        [shown(r.prompt), shown(r.text), sampling(r), count(r.tokens), str(r.model), count(r.model_step), str(r.run_id)]
        for r in generations.itertuples()
    ]
    return Table(columns, rows, caption(generations))


def caption(generations: pd.DataFrame) -> str:
    """What stands for line ends, and in how many answers the cache changed a token."""
    if generations.empty:
        return ""
    compared = generations["same_uncached"].dropna().astype(bool)
    text = f"Final weights of each run; {_NEWLINE} is the end of a line. "
    if compared.empty:
        return text + "No model here keeps keys and values."
    same = f"{int(compared.sum())} of {len(compared)} answers"
    return text + f"Without the cache of keys and values {same} are the same, token by token."


def shown(text: str | None) -> str:
    """A text in one line: ends of lines are marked, and what is no printable character is replaced.

    >>> shown("a\\n\\tb\\x00 <b>")
    'a↵ b� <b>'
    """
    marked = _NEWLINE.join((text or "").splitlines()) + _NEWLINE * (text or "").endswith("\n")
    return "".join(c if c.isprintable() else " " if c.isspace() else _UNPRINTABLE for c in marked)


def sampling(row) -> str:
    """How tokens were chosen, in words."""
    if row.temperature == 0:
        return "greedy"
    parts = [f"temperature {number(row.temperature)}"]
    parts += [f"top_k {int(row.top_k)}"] if row.top_k else []
    parts += [f"top_p {number(row.top_p)}"] if row.top_p < 1 else []
    return ", ".join([*parts, f"seed {int(row.seed)}"])
