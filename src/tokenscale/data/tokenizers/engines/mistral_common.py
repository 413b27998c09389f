"""Engine mistral-common: Mistral's own reader of Tekken, for comparison. The slowest engine, with heavy imports."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.tokenizers.base import Texts, join_ids, to_strings
from tokenscale.data.tokenizers.engines.engine import Unavailable


def open_engine(folder: Path, manifest: dict[str, Any]) -> "MistralCommon":
    """Open a Tekken file. Raises Unavailable without the package."""
    try:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError:
        raise Unavailable("no package mistral-common") from None
    return MistralCommon(Tekkenizer.from_file(folder / manifest["file"]["name"]))


class MistralCommon:
    """Engine of mistral-common."""

    def __init__(self, tokenizer: Any):
        self.version = version("mistral-common")
        self._tokenizer = tokenizer

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        return join_ids([self._tokenizer.encode(text, bos=False, eos=False) for text in to_strings(texts)])
