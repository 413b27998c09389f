"""Common interface of all tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tokenscale.base.files import (
    check_file_name,
    check_types,
    read_manifest_file,
    report_malformed,
)
from tokenscale.base.manifests import open_checked
from tokenscale.settings.data import TokenizerSettings

#: recorded in every manifest: control-token text inside a document stays ordinary text
SPECIAL_TOKEN_POLICY = "special-token text is text"
#: keys of a manifest with the ids of BOS, EOS, PAD and MASK, which never come from text
ROLES = ("bos_id", "eos_id", "pad_id", "mask_id")

#: input of an engine: a list of str, or an Arrow string array, which some engines read without
#: copying
Texts: TypeAlias = "Sequence[str] | pa.Array"


class Tokenizer(ABC):
    """Tokenizer without BOS and EOS. The writer of documents adds both
    (`data/stores/documents.py`).
    """

    #: package that encodes text, and its version; the kind itself if it needs no package
    engine: str
    engine_version: str | None = None
    #: id of text that the vocabulary does not cover, if there is one
    unknown_id: int | None = None

    def __init__(self, manifest: dict[str, Any]):
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.engine = self.kind
        self.vocabulary_size: int = manifest["vocabulary_size"]
        self.bos_id: int = manifest["bos_id"]
        self.eos_id: int | None = manifest["eos_id"]
        self.pad_id: int = manifest["pad_id"]
        self.file_sha256: str = manifest["file"]["sha256"]
        self.accepted_loss: float = manifest.get("accepted_loss", TokenizerSettings.accepted_loss)

    @abstractmethod
    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Return (concatenated ids of all texts, int32 [sum(lengths)]; lengths, int64 [texts]).

        Text that looks like a control token stays text.
        """

    def encode_batch(self, texts: Texts) -> list[np.ndarray]:
        return split_ids(*self.encode(texts))

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids. Malformed UTF-8 becomes U+FFFD; control tokens become their
        names.
        """

    def normalize(self, text: str) -> str:
        """Return the text as the tokenizer changes it before splitting it (lower case, NFKC, …)."""
        return text


def join_ids(lists: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the ids of several texts, as returned by `Tokenizer.encode`.

    >>> [array.tolist() for array in join_ids([[1, 2], [], [3]])]
    [[1, 2, 3], [2, 0, 1]]
    """
    lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
    parts = [np.asarray(ids, dtype=np.int32) for ids in lists]
    return (np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)), lengths


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the ids of each text as views, the inverse of `join_ids`."""
    return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def to_strings(texts: Texts) -> list[str]:
    return texts.to_pylist() if isinstance(texts, pa.Array) else list(texts)


VERSION = 2
#: required fields of a manifest and their types
FIELDS = {
    "name": str,
    "kind": str,
    "file": dict,
    "vocabulary_size": int,
    "bos_id": int,
    "eos_id": (int, type(None)),
    "pad_id": int,
}


def rebuild_command(directory: Path) -> str:
    return f"snakemake -f {Path(directory) / 'manifest.json'}"


def read_tokenizer_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a tokenizer. Raises UserError if it is missing, malformed, or of an
    unsupported version.
    """
    path = Path(directory) / "manifest.json"
    manifest = read_manifest_file(
        path,
        what="tokenizer",
        newest=VERSION,
        next=rebuild_command(directory),
        oldest=2,
    )
    with report_malformed(path, what="manifest of the tokenizer", next=rebuild_command(directory)):
        check_types(manifest, fields=FIELDS)
        for file in list_files(manifest):
            check_types(file, fields={"name": str, "bytes": int, "sha256": str})
            check_file_name(file["name"])
        ids = [manifest.get(role) or 0 for role in ROLES]
        if not all(0 <= found < manifest["vocabulary_size"] for found in ids):
            raise ValueError(f"control ids {ids} of {manifest['vocabulary_size']}")
        if not 0 <= manifest.get("accepted_loss", 0) <= 1:
            raise ValueError(f"accepted_loss {manifest['accepted_loss']}")
    return manifest


def list_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a tokenizer's files in its manifest: the file, and those derived from
    it.
    """
    return [manifest["file"], *manifest.get("derived", [])]


def open_tokenizer_file(
    folder: Path, manifest: dict[str, Any], name: str
) -> AbstractContextManager[BufferedReader]:
    """Open a file of a tokenizer, and check it: what is read is then what the manifest lists.

    Raises UserError as `open_checked` does, and for a manifest that lists no such file.
    """
    next_step = rebuild_command(folder)
    path = folder / "manifest.json"
    with report_malformed(path, what="manifest of the tokenizer", next=next_step):
        entry = {file["name"]: file for file in list_files(manifest)}[name]
    return open_checked(
        folder,
        name=name,
        size=entry["bytes"],
        sha256=entry["sha256"],
        what="tokenizer",
        next=next_step,
    )


def read_tokenizer_file(folder: Path, manifest: dict[str, Any], name: str | None = None) -> bytes:
    """Return the content of a file of a tokenizer, by default of the one that is not derived; see
    `open_tokenizer_file`.
    """
    name = name or manifest["file"]["name"]
    with open_tokenizer_file(folder, manifest, name) as file:
        return file.read()
