"""Tokenizer `numbers` of the source `dummy`: `<s>`, `</s>`, `<pad>` are 0, 1, 2, and the number n
is id n + 3.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import parse_json, write_json
from tokenscale.data.tokenizers.base import (
    Texts,
    Tokenizer,
    join_ids,
    read_tokenizer_file,
    to_strings,
)
from tokenscale.settings.data import TokenizerSettings

CONTROL = ("<s>", "</s>", "<pad>")


def make(
    settings: TokenizerSettings, directory: Path, corpus_directory: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Write the tokenizer's file, which holds the count of numbers, and return (file, manifest
    facts).
    """
    path = directory / "numbers.json"
    assert settings.vocabulary_size is not None  # the kind needs it
    numbers = settings.vocabulary_size - len(CONTROL)
    write_json(path, value={"control": list(CONTROL), "numbers": numbers})
    return path, {
        "vocabulary_size": settings.vocabulary_size,
        "bos_id": 0,
        "eos_id": 1,
        "pad_id": 2,
    }


class Numbers(Tokenizer):
    """Tokenizer of decimal numbers in a file written by `make`. `engine` is ignored: it needs no
    package.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], engine: str = "auto"):
        super().__init__(manifest)
        self._numbers: int = parse_json(read_tokenizer_file(path.parent, manifest))["numbers"]

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts; see `Tokenizer.encode`. Raises UserError for non-numbers and too large
        numbers.
        """
        return join_ids([self._encode(text) for text in to_strings(texts)])

    def _encode(self, text: str) -> np.ndarray:
        words = text.split()
        wrong = next((w for w in words if not (w.isascii() and w.isdigit() and len(w) < 10)), None)
        ids = np.array(words, dtype=np.int64) if wrong is None else np.zeros(0, dtype=np.int64)
        if wrong is None and ids.size and ids.max() >= self._numbers:
            wrong = str(ids.max())
        if wrong is not None:
            raise UserError(
                f"the tokenizer {self.name} reads numbers only.",
                found=repr(wrong[:40]),
                expected=f"numbers from 0 to {self._numbers - 1} with white space between",
                next="use it with a corpus of the kind dummy, or another tokenizer with this text",
            )
        return (ids + len(CONTROL)).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(
            CONTROL[i] if i < len(CONTROL) else str(i - len(CONTROL))
            for i in np.asarray(ids).tolist()
        )
