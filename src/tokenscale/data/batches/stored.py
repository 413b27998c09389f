"""Open the store of a run, without a tokenizer package; shared by the offline approaches."""

from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.batches.batch import BatchInputs
from tokenscale.data.batches.streams import list_sources
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.run import RunSettings


def open_run_stores(run: RunSettings, inputs: BatchInputs) -> list[tuple[Path, dict[str, Any]]]:
    """Check the run's store, or the stores of its mixture, and return each with its manifest.

    `inputs.store` is the folder of the store or of the mixture, or the path of the manifest. Corpus and tokenizer are
    compared if their folders are given. Raises UserError for any mismatch (see `stores.manifest.open_store`).
    """
    if inputs.store is None:
        raise UserError(
            f"approach {run.approach} needs a token store, but none was given.",
            run=run.identity,
            next=f"pass {list_manifests(run)['store']}",
        )
    tokenizer_sha256 = None
    if _exists(inputs.tokenizer):
        tokenizer_sha256 = read_tokenizer_manifest(inputs.tokenizer)["file"]["sha256"]
    stores = list_sources(run, inputs.store)
    corpora: list[Path | None] = [None] * len(stores)
    if _exists(inputs.corpus):
        corpora = [corpus_manifest(path) for path in list_sources(run, inputs.corpus)]
    opened: list[tuple[Path, dict[str, Any]]] = []
    for where, corpus in zip(stores, corpora, strict=True):
        manifest = open_store(
            where,
            run.store,
            requested_by=run.identity,
            tokenizer_name=run.tokenizer.name,
            # the stores of a mixture have the same tokenizer
            tokenizer_sha256=tokenizer_sha256 or (opened[0][1]["tokenizer"]["file_sha256"] if opened else None),
            vocabulary_size=run.model.vocabulary_size,
            corpus_manifest_sha256=sha256_file(corpus) if corpus is not None else None,
        )
        opened.append((where, manifest))
    return opened


def corpus_manifest(where: Path) -> Path:
    return where if where.suffix == ".json" else Path(where) / "manifest.json"


def _exists(directory: Path | None) -> bool:
    return directory is not None and (Path(directory) / "manifest.json").exists()
