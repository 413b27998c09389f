"""Lengths of all documents of a text in the tokens of a tokenizer: a store without ids.

An approach that tokenizes while training cuts its stream by them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.manifests import open_checked
from tokenscale.data.records import map_array
from tokenscale.data.stores.manifest import (
    open_records,
    read_store_manifest,
    rebuild_command,
    resolve_store,
)


class LengthsStore:
    """Lengths by document. `manifest` comes from `stores.manifest.open_store`.

    The file of a store that was written at once stays on disk and is mapped; those of parts are
    joined in memory, in 4 bytes a document.
    """

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self.total_tokens: int = manifest["tokens_total"]
        folder = resolve_store(where)[0]
        parts = [_map_file(where, folder, file) for file in manifest["files"]]
        self._lengths = parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def lengths_of(self, indices: np.ndarray | slice) -> np.ndarray:
        """Return the lengths of documents in tokens with BOS (and EOS), int64 [n]."""
        return self._lengths[indices].astype(np.int64)


def _map_file(where: Path, folder: Path, file: dict[str, Any]) -> np.memmap:
    """Map a file of a store's manifest. Raises UserError for a missing or changed one."""
    opened = open_checked(
        folder,
        name=file["name"],
        size=file["bytes"],
        sha256=file["sha256"],
        what="token store",
        next=rebuild_command(where),
    )
    with opened as lengths:
        return map_array(lengths)


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
