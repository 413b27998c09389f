"""Claims file: sentences, the conditions on the data under which they hold, and the checks of the file."""

import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings.experiments import SCALES
from tokenscale.settings.options import option, settings_class

#: placeholders that every sentence may use, besides columns of its SQL
PLACEHOLDERS = ("number", "spread", "n", "cells")


@settings_class
class Document:
    """Document that makes claims."""

    title: str = option(description="title of the document")
    where: str = option("", "place where it can be read, such as a repository")
    study: str = option("", "number of the source study, such as 000, for the replication table")


@settings_class
class Claim:
    """Sentence, and the condition on the data under which it holds."""

    document: str = option(description="document that makes the claim")
    claim: str = option(description="claim of the document, paraphrased")
    experiments: tuple[str, ...] = option(
        description="experiments whose tables are queried; the first one with rows is used"
    )
    sql: str = option(
        description="one SELECT with the column `value`, or `value` and `baseline`, whose quotient is then the number; "
        "with `run_id`, `other_run_id` (and further `…_run_id`), `cell`, and columns used in the sentence. All tables "
        "and named queries are available; no run may be in two points of a cell; external runs are left out"
    )
    sentence: str = option(
        description="sentence of the report with {number}, {spread}, {n} (points), {cells}, and columns of the SQL"
    )
    direction: Literal["above", "below", "equal"] = option(
        description="required position of the number relative to `bound`"
    )
    figure: str = option("", "number in the document")
    published: tuple[float, ...] = option(
        tuple, "the figure as numbers of the sentence's kind, one or a lowest and a highest, to say if it is reproduced"
    )
    corrected: tuple[float, ...] = option(
        tuple, "the published figure as it should be, which `remark` explains; the replication table compares with it"
    )
    bound: float = option(1.0, "value that the number is compared with")
    margin: float = option(
        0.0, "share of the bound within which the number is equal; above and below must differ by more", ge=0
    )
    exact: bool = option(False, "the number does not vary between runs (a count of tokens), so that one run is enough")
    cells: Literal["all", "largest"] = option("all", "cells in which the claim must hold: all, or the largest")
    compares: str | None = option(
        None,
        "setting that may differ between the runs (approach, world_size, layout, or a factor); others are left out",
    )
    unit: Literal["ratio", "percent", "plain"] = option("ratio", "format of the number")
    shown_in: str | None = option(None, "figure of the experiment that shows the number")
    needs: str = option("", "what a test needs, if these tables cannot test the claim")
    remark: str = option("", "remark for the reader")
    holds_at: tuple[str, ...] = option((), "scales at which the claim must hold: strict mode fails otherwise")


@settings_class
class ClaimsFile:
    """config/claims.yaml."""

    documents: dict[str, Document] = option(description="name → document")
    claims: dict[str, Claim] = option(description="name → claim")


def parse_placeholders(sentence: str, **where: object) -> list[str]:
    """Return the placeholders of a sentence. Raises UserError for braces that do not contain a name."""
    try:
        found = [(name, spec, convert) for _, name, spec, convert in string.Formatter().parse(sentence)]
    except ValueError as error:
        what, next = "the braces of a sentence do not match.", "write {name}, or {{ for a brace"
        raise UserError(what, reason=error, **where, next=next) from None
    for name, spec, convert in found:
        if name is not None and (spec or convert or not name.isidentifier()):
            expected = f"{', '.join(PLACEHOLDERS)}, or a column of the claim's SQL"
            raise UserError(
                f"{{{name}}} is not a placeholder.", **where, expected=expected, next="correct the sentence"
            )
    return [name for name, *_ in found if name is not None]


#: pattern of claims' names, from which LaTeX macros are derived
CLAIM_NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


def load_claims(path: Path) -> ClaimsFile:
    """Load and validate a file of claims. Raises UserError for invalid ones."""
    from tokenscale.settings import yaml_files  # with pydantic, which the report is read without

    ledger: ClaimsFile = yaml_files.build(ClaimsFile, yaml_files.read_yaml(path), file=str(path))
    yaml_files.raise_errors(_find_errors(ledger), file=str(path))
    return ledger


def _find_errors(ledger: ClaimsFile) -> Iterator[UserError]:
    for name, claim in ledger.claims.items():
        key = f"claims.{name}"
        if not re.fullmatch(CLAIM_NAME, name):
            expected = "small letters and digits, with dashes"
            yield UserError("a claim cannot have this name.", key=key, expected=expected, next="rename the claim")
        if claim.document not in ledger.documents:
            yield unknown("document", claim.document, ledger.documents, key=f"{key}.document")
        for scale in claim.holds_at:
            if scale not in SCALES:
                yield unknown("scale", scale, SCALES, key=f"{key}.holds_at")
        if claim.direction == "equal" and not claim.margin:
            what, next = "direction equal needs a margin above zero.", "set a margin, as a share of the bound"
            yield UserError(what, key=f"{key}.margin", next=next)
        if claim.direction == "equal" and not claim.bound:
            what, next = "direction equal needs a bound other than zero.", "use direction above or below"
            yield UserError(what, key=f"{key}.bound", next=next)
        try:
            parse_placeholders(claim.sentence, key=f"{key}.sentence")
        except UserError as error:
            yield error
