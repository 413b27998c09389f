"""Rows of the table `stores`: what token stores hold, and what it took to write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, report_malformed, sha256_file

Row = dict[str, Any]


def rows(manifests: list[Path], corpora: Sequence[Path] = ()) -> list[Row]:
    """One row a store, by corpus, tokenizer and folder; `manifests` are
    `…/<corpus>/<tokenizer>/<store>/manifest.json`, each with its `build.json` beside it, where it has not been lost.

    `corpora` are manifests of corpora: a store whose own manifest names one of them by its hash gets the bytes of the
    text that it was made of. Raises UserError for a file that is no manifest.
    """
    texts = dict(map(_corpus, corpora))
    found = [_row(path, texts) for path in manifests]
    return sorted(found, key=lambda row: (row["corpus"], row["tokenizer"], row["store"]))


def _corpus(path: Path) -> tuple[str, dict[str, int]]:
    """(hash of a corpus' manifest, split → bytes of its text)."""
    manifest = read_json(path, "corpus' manifest", next=f"snakemake {path} --cores 2")
    with report_malformed(path, "corpus' manifest", next=f"snakemake -f {path} --cores 2"):
        return sha256_file(path), {split: found["utf8_bytes"] for split, found in manifest["splits"].items()}


def _row(path: Path, texts: dict[str, Row]) -> Row:
    manifest = read_json(path, "store's manifest", next=f"snakemake {path} --cores 2")
    try:
        padding = manifest["places"] - manifest["tokens_stored"]
        return {
            "corpus": path.parts[-4],
            "tokenizer": manifest["tokenizer"]["name"],
            "store": path.parent.name,
            "format": manifest["format"],
            "split": manifest["split"],
            "sequence_length": manifest["options"].get("sequence_length"),
            "eos": manifest["options"]["eos"],
            "documents": manifest["documents"],
            "documents_cut": manifest.get("documents_cut", 0),
            "useful_tokens": manifest["tokens_useful"],
            "total_tokens": manifest["tokens_total"],
            "padding_tokens": padding,
            "ids": manifest["tokens_stored"],
            "vocabulary_size": manifest["vocabulary_size"],
            "entropy_bits": manifest["bits_per_token"]["order_0_entropy"],
            "stored_bytes": sum(file["bytes"] for file in manifest["files"]),
            "text_bytes": texts.get(manifest.get("corpus_manifest_sha256"), {}).get(manifest["split"]),
            "manifest_sha256": sha256_file(path),
            "corpus_sha256": manifest.get("corpus_manifest_sha256"),
            **_build(path.with_name("build.json")),
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            "this is no manifest of a token store that this version writes.",
            path=path,
            missing=error,
            next=f"snakemake -f {path} --cores 2",
        ) from None


def _build(path: Path) -> Row:
    """Return the engine and the seconds of the build; null if the record is lost.

    For a store in parts, the seconds are those of all jobs together."""
    if not path.is_file():
        return {}
    record = read_json(path, "record of the store's build")
    return {"engine": record.get("engine") or None, "seconds": record["duration_s"]}
