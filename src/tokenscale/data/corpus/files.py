"""Source `files`: a user's own Parquet, JSON lines, TSV or text, named by paths and globs."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.corpus.pairs import beside
from tokenscale.data.corpus.paths import MISSING, NO_MATCH, expand, named
from tokenscale.data.corpus.read import has_documents, read
from tokenscale.settings.data import FILE_LISTS, TARGETS_OF, CorpusSettings, SourceSettings

#: files carry no date that could be declared
#: a file whose content changed was changed on purpose: an earlier corpus is not kept (see build.py)
KEEP_EARLIER = False


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """The files by name, size and hash, for the manifest. Raises UserError where a name or a glob finds nothing."""
    paths = {key: expand(getattr(source, key), key) for key in FILE_LISTS}
    listed = {key: [_fact(name, path) for name, path in named(found).items()] for key, found in paths.items()}
    return {"kind": "files", **{k: v for k, v in listed.items() if v}}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str | None, str]]:
    """(text, origin) of every training document: files in the order they are named, a glob's sorted by path."""
    return islice(_documents(source, "files"), source.maximum_documents)


def validation_documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str | None, str]]:
    """(text, origin) of the source's own validation documents; none where it names no files for them."""
    return _documents(source, "validation_files")


def check(corpus: CorpusSettings, folder: Path, file_of: Callable[[str], str]) -> None:
    """Raise UserError for files that are missing or unreadable, columns that are not there, and text without documents.

    Reads only Parquet footers and first documents, so that planning can call it. `folder` holds the corpora: where the
    corpus is built, its files may be gone. `file_of` returns the configuration file that sets a dotted key.
    """
    built = (folder / corpus.name / "manifest.json").is_file()
    for key in ("files", "validation_files"):
        try:
            paths, targets = (expand(getattr(corpus.source, k), k) for k in (key, TARGETS_OF[key]))
            pairs = list(beside(list(named(paths).items()), targets, TARGETS_OF[key]))
            filled = [has_documents(path, corpus.source, target) for (_, path), target in pairs]
            if filled and not any(filled):
                raise UserError(
                    "a source has no documents.",
                    file=paths[0],
                    key=f"source.{key}",
                    found=f"{len(paths)} file(s), all empty",
                    next="put text there, or name other files",
                )
        except UserError as error:
            if built and error.what in (MISSING, NO_MATCH):
                continue
            key_there = f"corpora.{corpus.name}.{error.facts.get('key', f'source.{key}')}"
            facts = {"data": error.facts.get("file")} | {
                label: text for label, text in error.facts.items() if label not in ("file", "key")
            }
            raise UserError(error.what, file=file_of(key_there), key=key_there, **facts) from None


def _documents(source: SourceSettings, key: str) -> Iterator[tuple[str | None, str]]:
    paths, targets = (expand(getattr(source, k), k) for k in (key, TARGETS_OF[key]))
    for (name, path), target in beside(list(named(paths).items()), targets, TARGETS_OF[key]):
        for number, text in enumerate(read(path, source, target)):
            yield text, f"{name}::{number}"


def _fact(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
