"""`results/tokenizers/<name>/manifest.json`: reading it needs no tokenizer package."""

from pathlib import Path
from typing import Any

from tokenscale.files import read_manifest_file

VERSION = 2


def restore(directory: Path) -> str:
    """The command that makes a tokenizer again."""
    return f"snakemake -f {Path(directory) / 'manifest.json'}"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a tokenizer. UserError where it is missing, broken, or newer than this code."""
    return read_manifest_file(Path(directory) / "manifest.json", "tokenizer", VERSION, restore(directory), oldest=2)
