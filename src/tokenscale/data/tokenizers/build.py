"""Build or fetch of a tokenizer. Its folder holds file and manifest, so that stores can always be rebuilt."""

import importlib
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tokenscale import __version__
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json, sha256_file, sha256_text, utc_now, write_json
from tokenscale.data.tokenizers.backends import compare_engines
from tokenscale.data.tokenizers.base import SPECIAL_TOKEN_POLICY, VERSION
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS


def build(settings: TokenizerSettings, directory: Path, corpus_directory: Path | None = None) -> dict[str, Any]:
    """Write the tokenizer's file, `build.json` and, last, `manifest.json`. Return the manifest.

    Only the kind `bpe` needs `corpus_directory`: it is trained on the training split. The module of each kind defines
    `make(settings, directory, corpus_directory) -> (path, facts)`, `load(path, manifest, engine)`, and ENGINES, which
    are compared with the reference for `build.json`; with ENGINES, it also defines `control_texts(path)`. Raises
    UserError for options that do not fit the kind and for unavailable sources.
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
    kind = importlib.import_module(TOKENIZERS[settings.kind].module)
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
            "engines": compare_engines(directory, manifest, kind.ENGINES, kind.control_texts(path))
            if kind.ENGINES
            else {},
        },
    )
    write_json(directory / "manifest.json", manifest)
    return manifest
