"""Write a token store from a corpus and a tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenscale.data.stores.documents import DocumentRange, Documents
from tokenscale.data.stores.manifest import SingleFile, load_writer
from tokenscale.data.stores.parts import write_empty_part
from tokenscale.data.stores.text import EngineDiffers, TextDocuments, engine_error
from tokenscale.data.tokenizers.backends import REFERENCE
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import StoreSettings


def write_store(
    store: StoreSettings,
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    engine: str = "auto",
    batch_documents: int | None = None,
    single: SingleFile | None = None,
    part: tuple[int, int] | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the store and return its manifest.

    `engine` is the package that tokenizes. auto uses the fastest exact one, and starts over with the reference if a
    sample of this text gives other ids. The tokenizer gets `batch_documents` at a time, about 4 MiB by default. With
    `single` the store is this one file in `directory`; with `part` (k, n), it is part k of n, for `parts.merge_store`.
    `report(documents, utf8_bytes)` is called for each batch, `log` for a slower engine and the reason. Raises UserError
    for a split without documents, and for a requested engine that is not installed or not exact.
    """
    write_documents = load_writer(store.format)
    options = {"single": single} if single else {}
    tokenizer = load_tokenizer(tokenizer_directory, engine)
    for note in getattr(tokenizer, "notes", []):
        log(f"tokenizer {tokenizer.name}: {note}; using {tokenizer.engine}")

    def write(tokenizer: Tokenizer) -> dict[str, Any]:
        documents: Documents
        documents = TextDocuments(corpus_directory, tokenizer, store.split, store.eos, report, batch_documents)
        if part is not None and len(documents):
            documents = DocumentRange(documents, *part)
            if len(documents) == 0:
                return write_empty_part(store, corpus_directory, directory, *part)
        return write_documents(store, documents, directory, **options)

    try:
        return write(tokenizer)
    except EngineDiffers as error:
        if engine != "auto":
            raise engine_error(error, corpus_directory) from None
        log(f"{engine_error(error, corpus_directory).render()}\nstarting over with {REFERENCE}")
    return write(load_tokenizer(tokenizer_directory, REFERENCE))
