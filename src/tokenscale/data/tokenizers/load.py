"""Kinds of tokenizers. The folder of a tokenizer holds file and manifest, so that stores can always be rebuilt."""

import importlib
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale import __version__
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json, sha256_file, sha256_text, utc_now, write_json
from tokenscale.data.tokenizers import huggingface, numbers, tekken
from tokenscale.data.tokenizers.backends import compare_engines
from tokenscale.data.tokenizers.base import (
    SPECIAL_TOKEN_POLICY,
    VERSION,
    Tokenizer,
    read_tokenizer_manifest,
    rebuild_command,
)
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS


class Kind(NamedTuple):
    """Functions of a kind: `make` writes the tokenizer's file and returns it with facts of the manifest, `load` opens
    it, and `control_texts` returns the texts of its control tokens, for a kind with engines.
    """

    make: Callable[[TokenizerSettings, Path, Path | None], tuple[Path, dict[str, Any]]]
    load: Callable[[Path, dict[str, Any], str], Tokenizer]
    control_texts: Callable[[Path], list[str]] | None = None


KINDS = {
    "tekken": Kind(tekken.make, tekken.load, tekken.control_texts),
    "huggingface": Kind(huggingface.make, huggingface.load, huggingface.control_texts),
    "bpe": Kind(huggingface.train_bpe, huggingface.load, huggingface.control_texts),
    "numbers": Kind(numbers.make, numbers.load),
}


def _find_kind(name: str) -> Any:
    """Return the functions of a kind: those of `KINDS`, or a user's own module with functions of the same names."""
    return KINDS[name] if name in KINDS else importlib.import_module(TOKENIZERS[name].module)


def build(settings: TokenizerSettings, directory: Path, corpus_directory: Path | None = None) -> dict[str, Any]:
    """Write the tokenizer's file, `build.json` and, last, `manifest.json`. Return the manifest.

    Only the kind `bpe` needs `corpus_directory`: it is trained on the training split. The engines of the kind are
    compared with the reference for `build.json`. Raises UserError for options that do not fit the kind and for
    unavailable sources.
    """
    directory = Path(directory)
    if settings.kind not in TOKENIZERS:
        raise unknown("tokenizer kind", settings.kind, TOKENIZERS, key="tokenizer.kind")
    for field, problem in settings.problems():
        raise UserError(
            "the tokenizer settings do not fit together.",
            key=f"tokenizer.{field}",
            problem=problem,
            next=f"correct it for tokenizer {settings.name}",
        )
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    kind = _find_kind(settings.kind)
    path, facts = kind.make(settings, directory, corpus_directory)
    manifest = {
        "schema_version": VERSION,
        "name": settings.name,
        "kind": settings.kind,
        "special_token_policy": SPECIAL_TOKEN_POLICY,
        "file": {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)},
        **facts,
    }
    write_json(
        directory / "build.json",
        {
            "manifest_sha256": sha256_text(canonical_json(manifest)),
            "created_utc": utc_now(),
            "duration_s": time.monotonic() - started,
            "tokenscale": __version__,
            "python": sys.version,
            "machine": platform.node(),
            "engines": compare_engines(directory, manifest, kind.control_texts(path))
            if TOKENIZERS[settings.kind].engines
            else {},
        },
    )
    write_json(directory / "manifest.json", manifest)
    return manifest


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
    return _find_kind(manifest["kind"]).load(directory / manifest["file"]["name"], manifest, engine)
