"""Engine Hugging Face `tokenizers`: the reference for all other engines."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers.base import Texts, join_ids, to_strings
from tokenscale.data.tokenizers.engines.engine import Unavailable, count_threads, load_fast_json


def import_library(kind: str) -> Any:
    """Import and return the package `tokenizers`. Raises UserError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"tokenizers of kind {kind} need the package tokenizers.", next="install tokenizers (environment.yml)"
        ) from None
    return tokenizers


def open_engine(folder: Path, manifest: dict[str, Any]) -> "HuggingFace":
    """Open a tokenizer.json. Raises Unavailable without the package."""
    try:
        import tokenizers
    except ImportError:
        raise Unavailable("no package tokenizers") from None
    return HuggingFace(tokenizers.Tokenizer.from_str(load_fast_json(folder, manifest)))


class HuggingFace:
    """Engine of `tokenizers`."""

    def __init__(self, tokenizer: Any):
        self.version = version("tokenizers")
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        if "TOKENIZERS_PARALLELISM" not in os.environ:
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if count_threads() > 1 else "false"

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        return join_ids([e.ids for e in self._tokenizer.encode_batch_fast(to_strings(texts), add_special_tokens=False)])
