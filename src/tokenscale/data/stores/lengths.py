"""Lengths of all documents of a text in the tokens of a tokenizer: a store without ids.

An approach that tokenizes while training cuts its stream by them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.stores.manifest import open_records, read_store_manifest, resolve_store


class LengthsStore:
    """Lengths by document. `manifest` comes from `stores.manifest.open_store`.

    The file of a store that was written at once stays on disk and is mapped; those of parts are
    joined in memory, in 4 bytes a document.
    """

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self.total_tokens: int = manifest["tokens_total"]
        folder = resolve_store(where)[0]
        parts = [np.load(folder / file["name"], mmap_mode="r") for file in manifest["files"]]
        self._lengths = parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def lengths_of(self, indices: np.ndarray | slice) -> np.ndarray:
        """Return the lengths of documents in tokens with BOS (and EOS), int64 [n]."""
        return self._lengths[indices].astype(np.int64)


def find_lengths(folder: Path, eos: bool) -> np.ndarray | None:
    """Return the lengths of the training documents, from any store of a corpus and tokenizer
    (`results/tokens/CORPUS/TOKENIZER`) that has them; None where none is built.
    """
    for path in sorted(folder.glob("*/manifest.json")):
        with suppress(UserError):
            manifest = read_store_manifest(path)
            options = manifest["options"]
            if options["split"] != "train" or options["eos"] != eos:
                continue
            if manifest["format"] == "lengths":
                return LengthsStore(path, manifest).lengths_of(slice(None))
            if manifest["format"] == "token-list":
                return open_records(path, manifest).lengths()
    return None
