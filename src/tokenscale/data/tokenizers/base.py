"""Common interface of all tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

#: recorded in every manifest: control-token text inside a document stays ordinary text
SPECIAL_TOKEN_POLICY = "special-token text is text"

#: input of an engine: a list of str, or an Arrow string array, which some engines read without copying
Texts: TypeAlias = "Sequence[str] | pa.Array"


class Tokenizer(ABC):
    """Tokenizer without BOS and EOS. The writer of documents adds both (`data/stores/documents.py`)."""

    #: package that encodes text, and its version; the kind itself if it needs no package
    engine: str
    engine_version: str | None = None

    def __init__(self, manifest: dict[str, Any]):
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.engine = self.kind
        self.vocabulary_size: int = manifest["vocabulary_size"]
        self.bos_id: int = manifest["bos_id"]
        self.eos_id: int | None = manifest["eos_id"]
        self.pad_id: int = manifest["pad_id"]
        self.file_sha256: str = manifest["file"]["sha256"]

    @abstractmethod
    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Return (concatenated ids of all texts, int32 [sum(lengths)]; lengths, int64 [texts]).

        Text that looks like a control token stays text.
        """

    def encode_batch(self, texts: Texts) -> list[np.ndarray]:
        ids, lengths = self.encode(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids. Malformed UTF-8 becomes U+FFFD; control tokens become their names."""


def join_ids(lists: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the ids of several texts, as returned by `Tokenizer.encode`.

    >>> [array.tolist() for array in join_ids([[1, 2], [], [3]])]
    [[1, 2, 3], [2, 0, 1]]
    """
    lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
    parts = [np.asarray(ids, dtype=np.int32) for ids in lists]
    return (np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)), lengths


def to_strings(texts: Texts) -> list[str]:
    return texts.to_pylist() if isinstance(texts, pa.Array) else list(texts)
