"""What a package that turns text into ids offers us.

The module of an engine has a function `open_engine(folder, manifest) -> Engine`: the folder is a tokenizer's, with the
files that its manifest names. It raises Unavailable where the package is missing or cannot hold this tokenizer.
"""

import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenscale.data.tokenizers.base import Texts


class Engine(Protocol):
    """One tokenizer, held by a package."""

    version: str

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths as `tokenizer.base.Tokenizer.encode` gives them."""
        ...


class Unavailable(Exception):
    """Why an engine cannot be used here, in a few words."""


def load_fast_json(folder: Path, manifest: dict[str, Any]) -> str:
    """A tokenizer.json that adds, cuts and pads nothing, and in which the text of a control token is text."""
    if "derived" in manifest:  # ours, written that way: read as it is, megabytes of JSON parse slowly
        return (folder / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads((folder / manifest["file"]["name"]).read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data.get("added_tokens") or [] if not token.get("special")]
    return json.dumps(data | {"post_processor": None, "truncation": None, "padding": None})


def count_threads() -> int:
    """How many threads an engine may use: RAYON_NUM_THREADS, else the cores that this process may run on."""
    stated = os.environ.get("RAYON_NUM_THREADS", "")
    if stated.isdigit() and int(stated) > 0:
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
