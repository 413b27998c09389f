"""What the kinds `huggingface` and `bpe` share: a `tokenizers.Tokenizer` behind our interface."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.errors import UserError


def library(kind: str) -> Any:
    """The package `tokenizers`, or a UserError that says how to get it."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"tokenizers of kind {kind} need the package tokenizers.", next="install tokenizers (environment.yml)"
        ) from None
    return tokenizers


class FastTokenizer:
    """See `tokenizer.base.Tokenizer`. Encodes a batch on all cores unless TOKENIZERS_PARALLELISM=false."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.vocabulary_size: int = manifest["vocabulary_size"]
        self.bos_id: int = manifest["bos_id"]
        self.eos_id: int | None = manifest["eos_id"]
        self.pad_id: int = manifest["pad_id"]
        self.file_sha256: str = manifest["file"]["sha256"]
        self._tokenizer = library(manifest["kind"]).Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the text of a control token stays text

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, without BOS and EOS (a template in the file is not used)."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int32) for e in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; control tokens by name."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
