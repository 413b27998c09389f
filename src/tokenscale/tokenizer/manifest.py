"""`results/tokenizers/<name>/manifest.json`: reading it needs no tokenizer package."""

from pathlib import Path
from typing import Any

from tokenscale.errors import UserError
from tokenscale.files import read_json

VERSION = 1


def restore(directory: Path) -> str:
    """The command that makes a tokenizer again."""
    return f"snakemake -f {Path(directory) / 'manifest.json'}"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a tokenizer. UserError where it is missing, broken, or newer than this code."""
    path = Path(directory) / "manifest.json"
    manifest = read_json(path, "tokenizer manifest", restore(directory))
    version = manifest.get("schema_version", 0)
    if version > VERSION:
        raise UserError(
            "the tokenizer was written by a newer tokenscale.",
            tokenizer=path,
            found=f"schema_version {version}",
            expected=f"at most {VERSION}",
            next="upgrade tokenscale, or rebuild: " + restore(directory),
        )
    return manifest
