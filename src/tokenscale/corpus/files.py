"""Source `files`: a user's own Parquet, JSON lines, TSV or text, named by paths and globs."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenscale.corpus.pairs import beside
from tokenscale.corpus.paths import expand, named
from tokenscale.corpus.read import read
from tokenscale.files import sha256_file
from tokenscale.settings.data import FILE_LISTS, TARGETS_OF, SourceSettings

#: files carry no date that could be declared
SOURCE_DATE = "undated"
#: a file whose content changed was changed on purpose: an earlier corpus is not kept (see build.py)
KEEP_EARLIER = False


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """The files by name, size and hash, for the manifest. Raises UserError where a name or a glob finds nothing."""
    paths = {key: expand(getattr(source, key), key) for key in FILE_LISTS}
    listed = {key: [_fact(name, path) for name, path in named(found).items()] for key, found in paths.items()}
    return {"kind": "files", **{k: v for k, v in listed.items() if v}, "source_date": SOURCE_DATE}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str | None, str]]:
    """(text, origin) of every training document: files in the order they are named, a glob's sorted by path."""
    return islice(_documents(source, "files"), source.maximum_documents)


def validation_documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str | None, str]]:
    """(text, origin) of the source's own validation documents; none where it names no files for them."""
    return _documents(source, "validation_files")


def _documents(source: SourceSettings, key: str) -> Iterator[tuple[str | None, str]]:
    paths, targets = (expand(getattr(source, k), k) for k in (key, TARGETS_OF[key]))
    for (name, path), target in beside(list(named(paths).items()), targets, TARGETS_OF[key]):
        for number, text in enumerate(read(path, source, target)):
            yield text, f"{name}::{number}"


def _fact(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
