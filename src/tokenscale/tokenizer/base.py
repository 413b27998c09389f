"""The one interface over every tokenizer."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

#: stated in every manifest: the characters of a control token inside a document stay ordinary text
SPECIAL_TOKEN_POLICY = "special-token text is text"


class Tokenizer(Protocol):
    """Text to ids. Adds no BOS and no EOS: whoever writes documents does (`formats/documents.py`)."""

    name: str
    kind: str
    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    pad_id: int
    file_sha256: str

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32. Text that looks like a control token stays text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; broken UTF-8 becomes U+FFFD, control tokens their names."""
        ...
