"""Interface of tokenizer engines, the packages that encode text.

The module of each engine defines `open_engine(folder, manifest) -> Engine`. `folder` holds the files named in the
tokenizer's manifest. Raises Unavailable if the package is missing or cannot load the tokenizer.
"""

import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenscale.data.tokenizers.base import Texts


class Engine(Protocol):
    """Tokenizer loaded by one package."""

    version: str

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts to (ids, lengths), as `base.Tokenizer.encode`."""
        ...


class Unavailable(Exception):
    """Engine cannot be used here; the message is a short reason."""


def load_fast_json(folder: Path, manifest: dict[str, Any]) -> str:
    """Return a tokenizer.json without template, truncation, padding and special tokens, so control text stays text."""
    if "derived" in manifest:  # written by tokenscale in this form; parsing megabytes of JSON is slow
        return (folder / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads((folder / manifest["file"]["name"]).read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data.get("added_tokens") or [] if not token.get("special")]
    return json.dumps(data | {"post_processor": None, "truncation": None, "padding": None})


def count_threads() -> int:
    """Return the number of threads for an engine: RAYON_NUM_THREADS, otherwise the cores available to this process."""
    configured = os.environ.get("RAYON_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
