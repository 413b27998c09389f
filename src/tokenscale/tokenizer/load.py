"""A tokenizer from its folder."""

import importlib
from pathlib import Path

from tokenscale.errors import UserError, unknown
from tokenscale.files import sha256_file
from tokenscale.settings.registry import TOKENIZERS
from tokenscale.tokenizer.base import Tokenizer
from tokenscale.tokenizer.manifest import read_manifest, restore


def load(directory: Path) -> Tokenizer:
    """The tokenizer of `results/tokenizers/<name>/`, its file held against the manifest.

    Only the package that this kind needs is imported. Raises UserError for a missing or changed file.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if manifest["kind"] not in TOKENIZERS:
        raise unknown("tokenizer kind", manifest["kind"], TOKENIZERS, tokenizer=directory)
    path = directory / manifest["file"]["name"]
    if not path.exists():
        raise UserError("the tokenizer's file is missing.", file=path, next=restore(directory))
    if (found := sha256_file(path)) != manifest["file"]["sha256"]:
        raise UserError(
            "the tokenizer's file has changed.",
            file=path,
            expected=f"sha256 {manifest['file']['sha256']}  (manifest.json)",
            found=f"sha256 {found}",
            next=restore(directory),
        )
    return importlib.import_module(TOKENIZERS[manifest["kind"]]).load(path, manifest)
