"""Open the store of a run, without a tokenizer package; shared by the offline approaches."""

from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.tokenizers.manifest import read_tokenizer_manifest
from tokenscale.settings.run import RunSettings


def open_run_store(
    run: RunSettings, store_directory: Path | None, corpus_directory: Path | None, tokenizer_directory: Path | None
) -> dict[str, Any]:
    """Check the run's store and return its manifest. `store_directory` is its folder or the path of its manifest.

    Corpus and tokenizer are compared if their folders are given. Raises UserError for any mismatch (see
    `stores.manifest.open_store`).
    """
    if store_directory is None:
        raise UserError(
            f"approach {run.approach} needs a token store, but none was given.",
            run=run.identity,
            next=f"pass the folder results/tokens/{run.corpus.name}/{run.tokenizer.name}/{run.store.directory}",
        )
    return open_store(
        store_directory,
        run.store,
        requested_by=run.identity,
        tokenizer_name=run.tokenizer.name,
        tokenizer_sha256=read_tokenizer_manifest(tokenizer_directory)["file"]["sha256"]
        if _exists(tokenizer_directory)
        else None,
        vocabulary_size=run.model.vocabulary_size,
        corpus_manifest_sha256=sha256_file(Path(corpus_directory) / "manifest.json")
        if _exists(corpus_directory)
        else None,
    )


def _exists(directory: Path | None) -> bool:
    return directory is not None and (Path(directory) / "manifest.json").exists()
