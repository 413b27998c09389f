"""Claims file: sentences, the conditions on the data under which they hold, and the checks of the
file.
"""

import re
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings.experiments import SCALES
from tokenscale.settings.options import decode, option, raise_errors, settings_class
from tokenscale.settings.registry import ALIASES, FIGURES

#: placeholders that every sentence may use, besides columns of its SQL
PLACEHOLDERS = ("number", "spread", "n", "cells")


@settings_class
class Document:
    """Document that makes claims."""

    title: str = option(description="title of the document")
    where: str = option("", description="place where it can be read, such as a repository")
    study: str = option(
        "", description="number of the source study, such as 000, for the replication table"
    )


@settings_class
class Claim:
    """Sentence, and the condition on the data under which it holds."""

    document: str = option(description="document that makes the claim")
    claim: str = option(description="claim of the document, paraphrased")
    experiments: tuple[str, ...] = option(
        description="experiments to query; the first one with rows is used"
    )
    sql: str = option(
        description="one SELECT with the column `value`, or `value` and `baseline`, whose quotient is "
        "then the number; "
        "with `run_id`, `other_run_id` (and further `…_run_id`), `cell`, and columns used in the "
        "sentence. All tables "
        "and named queries are available; no run may be in two points of a cell; external runs "
        "are left out"
    )
    sentence: str = option(
        description="sentence with {number}, {spread}, {n} (points), {cells}, columns of the SQL"
    )
    direction: Literal["above", "below", "equal"] = option(
        description="position of the number relative to `bound`"
    )
    figure: str = option("", description="number in the document")
    published: tuple[float, ...] = option(
        tuple, description="the figure as numbers: one, or lowest and highest, to say if reproduced"
    )
    corrected: tuple[float, ...] = option(
        tuple,
        description="published figure as it should be (see `remark`), for the replication table",
    )
    bound: float = option(1.0, description="value that the number is compared with")
    margin: float = option(
        0.0,
        description="share of the bound that counts as equal; above and below must differ by more",
        ge=0,
    )
    exact: bool = option(
        False,
        description="the number does not vary between runs (a count of tokens), so that one run is enough",
    )
    cells: Literal["all", "largest"] = option(
        "all", description="cells in which the claim must hold: all, or the largest"
    )
    compares: str | None = option(
        None,
        description="setting that may differ between runs (approach, world_size, layout, factor)",
    )
    unit: Literal["ratio", "percent", "plain"] = option("ratio", description="format of the number")
    shown_in: str | None = option(
        None, description="figure of the experiment that shows the number"
    )
    needs: str = option("", description="what a test needs, if these tables cannot test the claim")
    remark: str = option("", description="remark for the reader")
    holds_at: tuple[str, ...] = option(
        (), description="scales at which the claim must hold: strict mode fails otherwise"
    )


@settings_class
class ClaimsFile:
    """config/claims.yaml."""

    documents: dict[str, Document] = option(description="name → document")
    claims: dict[str, Claim] = option(description="name → claim")


def parse_placeholders(sentence: str) -> list[str]:
    """Return the placeholders of a sentence. Raises ValueError for braces that do not contain a
    name.
    """
    found = [
        (name, spec, convert)
        for _, name, spec, convert in string.Formatter().parse(sentence)
        if name is not None
    ]
    for name, spec, convert in found:
        if spec or convert or not name.isidentifier():
            known = f"{', '.join(PLACEHOLDERS)} and the SQL's columns"
            raise ValueError(f"{{{name}}} is not a placeholder, but {known} are")
    return [name for name, *_ in found]


#: pattern of claims' names, from which LaTeX macros are derived
CLAIM_NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


def load_claims(path: Path) -> ClaimsFile:
    """Load and validate a file of claims. Raises UserError for invalid ones."""
    from tokenscale.settings.yaml_files import read_yaml  # PyYAML, which the report is read without

    ledger: ClaimsFile = decode(ClaimsFile, values=read_yaml(path), file=str(path))
    raise_errors(_find_errors(ledger), file=str(path))
    named = {
        name: replace(c, shown_in=ALIASES.get(c.shown_in or "", c.shown_in))
        for name, c in ledger.claims.items()
    }
    return replace(ledger, claims=named)


def _find_errors(ledger: ClaimsFile) -> Iterator[UserError | tuple[str, str]]:
    for name, claim in ledger.claims.items():
        key = f"claims.{name}"
        if not re.fullmatch(CLAIM_NAME, name):
            yield key, "a claim cannot have this name: use small letters and digits, with dashes"
        if claim.document not in ledger.documents:
            yield unknown(
                "document",
                word=claim.document,
                words=ledger.documents,
                key=f"{key}.document",
            )
        if claim.shown_in is not None and claim.shown_in not in (*FIGURES, *ALIASES):
            yield unknown(
                "figure",
                word=claim.shown_in,
                words=(*FIGURES, *ALIASES),
                key=f"{key}.shown_in",
            )
        for scale in claim.holds_at:
            if scale not in SCALES:
                yield unknown(
                    "scale",
                    word=scale,
                    words=SCALES,
                    key=f"{key}.holds_at",
                )
        if claim.direction == "equal" and not claim.margin:
            yield (
                f"{key}.margin",
                "direction equal needs a margin above zero, as a share of the bound",
            )
        if claim.direction == "equal" and not claim.bound:
            yield (
                f"{key}.bound",
                "direction equal needs a bound other than zero: use direction above or below",
            )
        try:
            parse_placeholders(claim.sentence)
        except ValueError as error:
            yield f"{key}.sentence", f"{error}. A brace is written {{{{"
