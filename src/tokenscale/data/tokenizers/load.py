"""Kinds of tokenizers. The folder of a tokenizer holds file and manifest, so that stores can always
be rebuilt.
"""

import importlib
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale import __version__
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import (
    canonical_json,
    sha256_file,
    sha256_text,
    utc_now,
    write_json,
    write_sealed,
)
from tokenscale.data.tokenizers import huggingface, numbers, tekken
from tokenscale.data.tokenizers.backends import compare_engines
from tokenscale.data.tokenizers.base import (
    SPECIAL_TOKEN_POLICY,
    VERSION,
    Tokenizer,
    list_files,
    open_tokenizer_file,
    read_tokenizer_manifest,
)
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS


class Kind(NamedTuple):
    """Functions of a kind. `make` writes the tokenizer's file and returns it with facts of the
    manifest (and `notes`, lines for the log); `load` opens it.
    """

    make: Callable[[TokenizerSettings, Path, Path | None], tuple[Path, dict[str, Any]]]
    load: Callable[[Path, dict[str, Any], str], Tokenizer]


KINDS = {
    "tekken": Kind(tekken.make, load=tekken.Tekken),
    "huggingface": Kind(huggingface.make, load=huggingface.JsonTokenizer),
    "bpe": Kind(huggingface.train_bpe, load=huggingface.JsonTokenizer),
    "numbers": Kind(numbers.make, load=numbers.Numbers),
}


def _find_kind(name: str) -> Any:
    """Return the functions of a kind: those of `KINDS`, or a user's own module with functions of
    the same names.
    """
    if name in KINDS:
        return KINDS[name]
    module = TOKENIZERS[name].module
    assert module is not None  # as of every kind of a user
    return importlib.import_module(module)


def build(
    settings: TokenizerSettings,
    directory: Path,
    corpus_directory: Path | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the tokenizer's file, `build.json` and, last, `manifest.json`. Return the manifest.

    Only the kind `bpe` needs `corpus_directory`: it is trained on the training split. The engines
    of the kind are compared with the reference for `build.json`. `log` receives what was switched
    off or left out. Raises UserError for options that do not fit the kind, for unavailable sources,
    and for a tokenizer that is no function of the text.
    """
    directory = Path(directory)
    if settings.kind not in TOKENIZERS:
        raise unknown(
            "tokenizer kind",
            word=settings.kind,
            words=TOKENIZERS,
            key="tokenizer.kind",
        )
    for field, problem in settings.problems():
        what = "the tokenizer settings do not fit together."
        next_step = f"correct it for tokenizer {settings.name}"
        raise UserError(what, key=f"tokenizer.{field}", problem=problem, next=next_step)
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    kind = _find_kind(settings.kind)
    path, facts = kind.make(settings, directory, corpus_directory)
    for note in facts.pop("notes", ()):
        log(f"tokenizer {settings.name}: {note}")
    if settings.accepted_loss != TokenizerSettings.accepted_loss:
        facts["accepted_loss"] = settings.accepted_loss
    manifest = {
        "schema_version": VERSION,
        "name": settings.name,
        "kind": settings.kind,
        "special_token_policy": SPECIAL_TOKEN_POLICY,
        "file": {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)},
        **facts,
    }
    write_sealed(
        directory / "build.json",
        record={
            "manifest_sha256": sha256_text(canonical_json(manifest)),
            "created_utc": utc_now(),
            "duration_s": time.monotonic() - started,
            "tokenscale": __version__,
            "python": sys.version,
            "machine": platform.node(),
            "engines": compare_engines(directory, manifest)
            if TOKENIZERS[settings.kind].engines
            else {},
        },
    )
    write_json(directory / "manifest.json", value=manifest)
    return manifest


def load_tokenizer(directory: Path, engine: str = "auto") -> Tokenizer:
    """Load the tokenizer of `results/tokenizers/<name>/` and check its files against the manifest.

    `engine` names the package that encodes text; `auto` chooses the fastest installed engine that
    is exact.

    Raises UserError for a missing or changed file, an unknown kind, and an engine that cannot be
    used.
    """
    directory = Path(directory)
    manifest = read_tokenizer_manifest(directory)
    if manifest["kind"] not in TOKENIZERS:
        raise unknown(
            "tokenizer kind",
            word=manifest["kind"],
            words=TOKENIZERS,
            tokenizer=directory,
        )
    for file in list_files(manifest):
        with open_tokenizer_file(directory, manifest, name=file["name"]):
            pass
    return _find_kind(manifest["kind"]).load(directory / manifest["file"]["name"], manifest, engine)
