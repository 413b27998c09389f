"""Loading of a tokenizer from its folder."""

import importlib
from pathlib import Path

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import sha256_file
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest, rebuild_command
from tokenscale.settings.registry import TOKENIZERS


def load_tokenizer(directory: Path, engine: str = "auto") -> Tokenizer:
    """Load the tokenizer of `results/tokenizers/<name>/` and check its files against the manifest.

    `engine` names the package that encodes text; `auto` chooses the fastest installed engine that is exact. Raises
    UserError for a missing or changed file, an unknown kind, and an engine that cannot be used.
    """
    directory = Path(directory)
    manifest = read_tokenizer_manifest(directory)
    if manifest["kind"] not in TOKENIZERS:
        raise unknown("tokenizer kind", manifest["kind"], TOKENIZERS, tokenizer=directory)
    for file in [manifest["file"], *manifest.get("derived", [])]:
        path = directory / file["name"]
        if not path.is_file():
            raise UserError("the tokenizer's file is missing.", file=path, next=rebuild_command(directory))
        if (found := sha256_file(path)) != file["sha256"]:
            raise UserError(
                "the tokenizer's file has changed.",
                file=path,
                expected=f"sha256 {file['sha256']}  (manifest.json)",
                found=f"sha256 {found}",
                next=rebuild_command(directory),
            )
    module = importlib.import_module(TOKENIZERS[manifest["kind"]].module)
    return module.load(directory / manifest["file"]["name"], manifest, engine)
