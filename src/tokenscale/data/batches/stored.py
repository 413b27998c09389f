"""What the approaches share that read a token store: opening it, against the run. No tokenizer package."""

from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.tokenizers.manifest import read_manifest
from tokenscale.settings.run import RunSettings


def checked_manifest(
    run: RunSettings, store_directory: Path | None, corpus_directory: Path | None, tokenizer_directory: Path | None
) -> dict[str, Any]:
    """The manifest of the run's store: `store_directory` is its folder, or the path of its manifest.

    The corpus and the tokenizer are compared where their folders are given. Raises UserError where anything
    does not match (see `formats.manifest.open_store`).
    """
    if store_directory is None:
        raise UserError(
            f"approach {run.approach} reads a token store, and none was given.",
            run=run.identity,
            next=f"name the folder results/tokens/{run.corpus.name}/{run.tokenizer.name}/{run.store.directory}",
        )
    return open_store(
        store_directory,
        run.store,
        requested_by=run.identity,
        tokenizer_name=run.tokenizer.name,
        tokenizer_sha256=read_manifest(tokenizer_directory)["file"]["sha256"] if _exists(tokenizer_directory) else None,
        vocabulary_size=run.model.vocabulary_size,
        corpus_manifest_sha256=sha256_file(Path(corpus_directory) / "manifest.json")
        if _exists(corpus_directory)
        else None,
    )


def _exists(directory: Path | None) -> bool:
    return directory is not None and (Path(directory) / "manifest.json").exists()
