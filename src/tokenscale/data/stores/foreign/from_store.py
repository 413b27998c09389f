"""Documents of a token store, for the writers of foreign formats."""

from collections.abc import Callable, Iterator
from typing import Any

from tokenscale.data.stores.documents import Chunk, Origin
from tokenscale.data.stores.foreign.reframe import ExportCounts, ExportFraming, export_chunk


class StoreDocuments:
    """Documents of a store with or without EOS after each; see `documents.Documents`."""

    def __init__(self, reader: Any, manifest: dict[str, Any], eos: bool):
        self._reader, self._manifest, self._eos = reader, manifest, eos
        self.report: Callable[[int, int], None] | None = None
        source_keys = ("corpus_manifest_sha256", "text_sha256", "special_token_policy", "converted_from")
        self.origin = Origin(
            tokenizer=manifest["tokenizer"],
            vocabulary_size=manifest["vocabulary_size"],
            bos_id=manifest["bos_id"],
            eos_id=manifest["eos_id"],
            pad_id=manifest["padding"]["id"],
            source={name: manifest[name] for name in source_keys if name in manifest},
            engine=f"the store {manifest['ids_digest']['value'][:12]}",
        )

    def __len__(self) -> int:
        return self._manifest["documents"]

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        has_eos = self._manifest["options"]["eos"]
        for chunk in self._reader.chunks(first, last):
            if self._eos and not has_eos:
                chunk = export_chunk(chunk, ExportFraming(True, self.origin.eos_id), ExportCounts())
            elif has_eos and not self._eos:
                chunk = drop_eos(chunk)
            yield chunk
            if self.report is not None:
                self.report(len(chunk.lengths), chunk.ids.nbytes)

    def confirm(self) -> None:
        """Do nothing, since the store's reader has verified its checksums."""


def drop_eos(chunk: Chunk) -> Chunk:
    """Return the documents without their last token, which is EOS."""
    keep = chunk.ids >= 0
    keep[chunk.lengths.cumsum() - 1] = False
    return Chunk(chunk.ids[keep], chunk.lengths - 1)
