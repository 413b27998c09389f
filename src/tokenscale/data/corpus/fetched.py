"""Sources `url` and `hub`, read from the folder written by the command `download`."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.data.corpus.columns import match_targets, select_part
from tokenscale.data.corpus.raw_text import check_file
from tokenscale.data.corpus.read import read_texts
from tokenscale.settings.data import FILE_LISTS, TRANSLATION_KEYS, SourceSettings


def describe(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Check the files of a part against the download's manifest and return the source's entry. Raises UserError for a
    missing or changed file.
    """
    manifest = _read_manifest(downloads)
    for key in (key for key in FILE_LISTS if key in manifest):
        manifest[key] = select_part(manifest[key], part)
        for file in manifest[key]:
            check_file(
                downloads / file["name"],
                file["bytes"],
                file["sha256"],
                what="download",
                next=f"snakemake -f {downloads / 'manifest.json'}",
                content=True,
            )
    return {k: v for k, v in manifest.items() if k != "schema_version"}


def documents(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> Iterator[tuple[str | None, str]]:
    return islice(_read_documents(source, downloads, "files", part), source.maximum_documents)


def validation_documents(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> Iterator[tuple[str | None, str]]:
    return _read_documents(source, downloads, "validation_files", part)


def _read_documents(
    source: SourceSettings, downloads: Path | None, key: str, part: tuple[int, int] | None
) -> Iterator[tuple[str | None, str]]:
    manifest = _read_manifest(downloads)
    targets = [downloads / file["name"] for file in manifest.get(TRANSLATION_KEYS[key], ())]
    pairs = list(match_targets(manifest.get(key, []), targets, TRANSLATION_KEYS[key]))
    for file, target in select_part(pairs, part):
        for number, text in enumerate(read_texts(downloads / file["name"], source, target)):
            yield text, f"{file['name']}::{number}"


def _read_manifest(downloads: Path | None) -> dict[str, Any]:
    if downloads is None:
        raise UserError(
            "the corpus has a remote source, and --downloads is missing.",
            next="--downloads results/downloads/NAME/manifest.json  (snakemake names it itself)",
        )
    path = downloads / "manifest.json"
    return read_json(path, "manifest of the download", f"snakemake {path}")
