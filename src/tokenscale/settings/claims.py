"""The ledger of claims: sentences, and what data must say for them to hold. Read by `settings/claims.py`."""

import string
from dataclasses import dataclass
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.settings.options import STRICT, option

#: what every sentence may name, beside columns of its SQL
PLACEHOLDERS = ("number", "spread", "n", "cells")


@dataclass(frozen=True)
class Document:
    """Where claims come from."""

    __pydantic_config__ = STRICT

    title: str = option(description="what it is called")
    where: str = option("", "repository, or the like, where one can read it")


@dataclass(frozen=True)
class Claim:
    """A sentence, and what the data must say for it to hold."""

    __pydantic_config__ = STRICT

    document: str = option(description="which of the documents makes it")
    claim: str = option(description="what the document says, in our words")
    experiments: tuple[str, ...] = option(description="whose tables are asked; the first one with rows answers")
    sql: str = option(
        description="one SELECT: rows of `value`, or of `value` and `baseline`, whose quotient then is the number; "
        "with `run_id`, `other_run_id` (and more `…_run_id`), `cell`, and what the sentence names; all tables and "
        "named queries can be asked; no run may be in two points of a cell; runs of other programs are left out"
    )
    sentence: str = option(
        description="what is reported: {number}, {spread}, {n} (points), {cells}, and columns of the SQL by their names"
    )
    direction: Literal["above", "below", "equal"] = option(description="where the number must be, seen from `bound`")
    figure: str = option("", "the document's own figure")
    bound: float = option(1.0, "what the number is held against")
    margin: float = option(
        0.0, "share of the bound: so far from it is equal; above or below have to be further from it than this", ge=0
    )
    exact: bool = option(False, "the number does not vary from run to run (a count of tokens): one is enough")
    cells: Literal["all", "largest"] = option("all", "where there are several: it must hold in all, or in the largest")
    compares: str | None = option(
        None, "what may differ between the runs (approach, world_size, layout, or a factor): others are left out"
    )
    unit: Literal["ratio", "percent", "plain"] = option("ratio", "how the number is written")
    shown_in: str | None = option(None, "figure of the experiment that shows it")
    needs: str = option("", "what it takes to test it, where these tables cannot")
    remark: str = option("", "what is to be known about it")
    holds_at: tuple[str, ...] = option((), "scales at which the sentence is relied on: strict mode fails if it is lost")


@dataclass(frozen=True)
class ClaimsFile:
    """config/claims.yaml."""

    __pydantic_config__ = STRICT

    documents: dict[str, Document] = option(description="name → document")
    claims: dict[str, Claim] = option(description="name → claim")


def parse_placeholders(sentence: str, **where: object) -> list[str]:
    """The names in the braces of a sentence. Raises UserError for braces that hold anything else."""
    try:
        found = [(name, spec, convert) for _, name, spec, convert in string.Formatter().parse(sentence)]
    except ValueError as error:
        raise UserError("the braces of a sentence do not match.", reason=error, **where) from None
    for name, spec, convert in found:
        if name is not None and (spec or convert or not name.isidentifier()):
            raise UserError(
                f"{{{name}}} is no name.",
                **where,
                expected=f"{', '.join(PLACEHOLDERS)}, or a column of the claim's SQL",
            )
    return [name for name, *_ in found if name is not None]


#: names of claims; the LaTeX macros are made of them
CLAIM_NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
