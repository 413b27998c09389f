"""Documents as ids: exactly one BOS, the text, and EOS where the run asks for it."""

import hashlib
from collections.abc import Sequence

import numpy as np

from tokenscale.errors import UserError
from tokenscale.tokenizer.base import Tokenizer

#: documents of one call of a tokenizer
BATCH_DOCUMENTS = 512


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], eos: bool) -> list[np.ndarray]:
    """[BOS] + ids (+ [EOS]) of each text, int32; at least one token. UserError for EOS where the tokenizer has none."""
    if eos and tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token.",
            key="eos",
            next="set `eos` of the tokenizer, or `eos: false` for the run",
        )
    head = np.array([tokenizer.bos_id], dtype=np.int32)
    tail = np.array([tokenizer.eos_id] if eos else [], dtype=np.int32)
    return [np.concatenate((head, ids, tail)) for ids in tokenizer.encode_batch(texts)]


class IdsDigest:
    """SHA-256 over all documents in order, uncut: for each its length as int64, then its ids as uint32, little-endian.

    Stores of the same text and tokenizer have the same digest, whatever their format does with the documents.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, document: np.ndarray) -> None:
        """Take in the next document."""
        self._digest.update(len(document).to_bytes(8, "little"))
        self._digest.update(np.ascontiguousarray(document, dtype="<u4").tobytes())

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()
