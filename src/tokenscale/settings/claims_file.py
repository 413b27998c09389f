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
    """Load and validate a file of claims. Raises UserError for invalid ones."""
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
                "direction equal needs a margin above zero.",
                file=path,
                key=f"{key}.margin",
                next="set a margin, as a share of the bound",
            )
        if not (math.isfinite(claim.bound) and math.isfinite(claim.margin)):
            raise UserError(
                "bound and margin must be finite numbers.",
                file=path,
                key=key,
                found=f"{claim.bound} ± {claim.margin}",
                next="write a finite number",
            )
        if claim.direction == "equal" and not claim.bound:
            raise UserError(
                "direction equal needs a bound other than zero.",
                file=path,
                key=f"{key}.bound",
                next="use direction above or below",
            )
        parse_placeholders(claim.sentence, file=path, key=f"{key}.sentence")
    return ledger
