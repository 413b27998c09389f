"""Read and validate `config/claims.yaml`. Host only (pydantic, YAML)."""

import math
import re
from pathlib import Path

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings import validate
from tokenscale.settings.claims import CLAIM_NAME, ClaimsFile, parse_placeholders
from tokenscale.settings.experiments import SCALES
from tokenscale.settings.yaml_files import read_yaml


def load_claims(path: Path) -> ClaimsFile:
    """Return the claims of a file. Raises UserError: file, key, and what is wrong there. Host only (pydantic, YAML)."""
    ledger: ClaimsFile = validate.build(ClaimsFile, read_yaml(path), file=str(path))
    for name, claim in ledger.claims.items():
        key = f"claims.{name}"
        if not re.fullmatch(CLAIM_NAME, name):
            raise UserError(
                "a claim cannot have this name.",
                file=path,
                key=key,
                expected="small letters and digits, with dashes",
                next="rename the claim",
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
            raise UserError(
                "a bound is a number.",
                file=path,
                key=key,
                found=f"{claim.bound} ± {claim.margin}",
                next="write a finite number",
            )
        if claim.direction == "equal" and not claim.bound:
            raise UserError(
                "nothing is equal to 0 within a share of 0.", file=path, key=f"{key}.bound", next="claim above or below"
            )
        parse_placeholders(claim.sentence, file=path, key=f"{key}.sentence")
    return ledger
