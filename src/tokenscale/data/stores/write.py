"""A corpus and a tokenizer → one token store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenscale.data.stores.manifest import SingleFile, load_format
from tokenscale.data.stores.text import EngineDiffers, TextDocuments, engine_error
from tokenscale.data.tokenizers.backends import REFERENCE
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
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the store and return its manifest.

    `engine` names the package that makes the ids; auto takes the fastest that is exact and, should the gate find that
    it is not on this text, begins anew with the reference. The tokenizer gets `batch_documents` at a time, about 4 MiB
    by default. With `single` the store is that one file of `directory`. `report(documents, utf8_bytes)` hears of each
    batch, `log` of a slower engine and why. Raises UserError for a split without documents, and for an engine that was
    asked for and is not here or not exact.
    """
    writer = load_format(store.format)
    options = {"single": single} if single else {}
    tokenizer = load_tokenizer(tokenizer_directory, engine)
    for note in getattr(tokenizer, "notes", []):
        log(f"tokenizer {tokenizer.name}: {note}; using {tokenizer.engine}")
    try:
        documents = TextDocuments(corpus_directory, tokenizer, store.split, store.eos, report, batch_documents)
        return writer.write(store, documents, directory, **options)
    except EngineDiffers as error:
        if engine != "auto":
            raise engine_error(error, corpus_directory) from None
        log(f"{engine_error(error, corpus_directory).render()}\nbeginning anew with {REFERENCE}")
    tokenizer = load_tokenizer(tokenizer_directory, REFERENCE)
    documents = TextDocuments(corpus_directory, tokenizer, store.split, store.eos, report, batch_documents)
    return writer.write(store, documents, directory, **options)
