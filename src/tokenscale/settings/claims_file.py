"""`config/claims.yaml` → the ledger of claims. Host only (pydantic)."""

import math
import re
from pathlib import Path

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings import validate
from tokenscale.settings.claims import Ledger, named_in
from tokenscale.settings.scales import SCALES
from tokenscale.settings.yaml_files import read_yaml

#: names of claims; the LaTeX macros are made of them
CLAIM = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


def read(path: Path) -> Ledger:
    """The ledger of a file. Raises UserError: file, key, and what is wrong there."""
    ledger: Ledger = validate.build(Ledger, read_yaml(path), file=str(path))
    for name, claim in ledger.claims.items():
        key = f"claims.{name}"
        if not re.fullmatch(CLAIM, name):
            raise UserError(
                "a claim cannot have this name.", file=path, key=key, expected="small letters and digits, with dashes"
            )
        if claim.document not in ledger.documents:
            raise unknown("document", claim.document, ledger.documents, file=path, key=f"{key}.document")
        for scale in claim.holds_at:
            if scale not in SCALES:
                raise unknown("scale", scale, SCALES, file=path, key=f"{key}.holds_at")
        if claim.direction == "equal" and not claim.margin:
            raise UserError(
                "equal within what?", file=path, key=f"{key}.margin", next="state a margin, as a share of the bound"
            )
        if not (math.isfinite(claim.bound) and math.isfinite(claim.margin)):
            raise UserError("a bound is a number.", file=path, key=key, found=f"{claim.bound} ± {claim.margin}")
        if claim.direction == "equal" and not claim.bound:
            raise UserError(
                "nothing is equal to 0 within a share of 0.", file=path, key=f"{key}.bound", next="claim above or below"
            )
        named_in(claim.sentence, file=path, key=f"{key}.sentence")
    return ledger
