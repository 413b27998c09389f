"""Sources of files: Parquet, JSON lines, TSV or text, given as paths and globs or downloaded by
`download`.
"""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import read_record, sha256_file
from tokenscale.base.manifests import open_checked
from tokenscale.data.corpus.columns import match_targets, select_part
from tokenscale.data.corpus.read import RawFile, has_documents, read_raw_file
from tokenscale.settings.data import FILE_LISTS, TRANSLATION_KEYS, CorpusSettings, SourceSettings

MISSING = "a source file is missing."
NO_MATCH = "no file fits a source's pattern."


def expand_patterns(patterns: tuple[str, ...], key: str = "files") -> list[Path]:
    """Return the files that match the paths and globs, each once, also where links give it further
    names. Raises UserError for a pattern without a match.
    """
    found: dict[object, Path] = {}
    for pattern in patterns:
        # an existing path is taken literally, even with glob characters
        matches = (
            [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        )
        paths = [Path(match) for match in matches if os.path.isfile(match)]
        if not paths:
            raise _no_match_error(pattern, key, matches=matches)
        for path in paths:
            facts = path.stat()
            # some file systems number no files
            found.setdefault((facts.st_dev, facts.st_ino) if facts.st_ino else path, path)
    return list(found.values())


def shorten_paths(paths: list[Path]) -> dict[str, Path]:
    """Return {path relative to the common parent: absolute path}, so that names hold no local
    directories.

    Bytes of a name that are not UTF-8 become `\\xNN`.

    >>> list(shorten_paths([Path("/data/x/a.txt"), Path("/data/y/a.txt")]))
    ['x/a.txt', 'y/a.txt']
    """
    if not paths:
        return {}
    absolute_paths = [path.absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in absolute_paths])
    return {
        os.fsencode(p.relative_to(common)).decode(errors="backslashreplace"): p
        for p in absolute_paths
    }


def _no_match_error(pattern: str, key: str, matches: list[str]) -> UserError:
    folder = Path(pattern).parent
    if matches:
        what = "a source names a folder, not files."
        endings = Counter(path.suffix for path in Path(matches[0]).glob("*.*"))
        ending = max(endings, key=endings.__getitem__, default=".parquet")
        next_step = f"name its files: {Path(pattern) / f'*{ending}'}"
        if not Path(matches[0]).is_dir():
            what = "this is not a regular file."
            next_step = "name a file"
        return UserError(what, key=f"source.{key}", found=pattern, next=next_step)
    names = sorted(p.name for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    near = find_nearest(Path(pattern).name, words=names)
    return UserError(
        MISSING if not glob.has_magic(pattern) else NO_MATCH,
        key=f"source.{key}",
        requested=pattern,
        folder=f"{folder} holds {len(names)} file(s)"
        if folder.is_dir()
        else f"{folder} does not exist",
        next=f"did you mean {near!r}?" if near else "put the data there, or correct the path",
    )


def describe(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the source's entry: name, size and hash of each file of a part."""
    described = {
        key: [
            {"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for name, path in list_files(source, key, part=part)
        ]
        for key in FILE_LISTS
    }
    return {"kind": "files", **{k: v for k, v in described.items() if v}}


def describe_downloads(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the source's entry. Raises UserError for a missing file of a part, or one of another
    size; its hash is checked when it is read.
    """
    manifest = _read_download_manifest(downloads)
    assert downloads is not None  # else the manifest is refused
    for key in (key for key in FILE_LISTS if key in manifest):
        manifest[key] = select_part(manifest[key], part)
        for file in manifest[key]:
            with _open_download(downloads, file | {"sha256": None}):
                pass
    return {k: v for k, v in manifest.items() if k != "schema_version"}


def _open_download(
    downloads: Path, entry: dict[str, Any]
) -> AbstractContextManager[BufferedReader]:
    """Open a downloaded file, and check it against its entry in the manifest."""
    return open_checked(
        downloads,
        name=entry["name"],
        size=entry["bytes"],
        sha256=entry["sha256"],
        what="download",
        next=f"snakemake -f {downloads / 'manifest.json'}",
    )


def documents(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> Iterator[tuple[str | None, str]]:
    """Yield (text, origin) of every training document. Patterns keep their order; matches of a glob
    are sorted.
    """
    return islice(
        _read_documents(
            source,
            downloads,
            key="files",
            part=part,
        ),
        source.maximum_documents,
    )


def validation_documents(
    source: SourceSettings, downloads: Path | None = None, part: tuple[int, int] | None = None
) -> Iterator[tuple[str | None, str]]:
    return _read_documents(
        source,
        downloads,
        key="validation_files",
        part=part,
    )


def list_files(
    source: SourceSettings, key: str, part: tuple[int, int] | None = None
) -> list[tuple[str, Path]]:
    """Return (name, path) of the files of a part. Names are relative to the common parent of all
    files.
    """
    return list(
        select_part(list(shorten_paths(expand_patterns(getattr(source, key), key)).items()), part)
    )


def check_files(corpus: CorpusSettings, folder: Path, file_of: Callable[[str], str]) -> None:
    """Raise UserError for missing or unreadable files, missing columns, and sources without
    documents.

    Reads only Parquet footers and first documents, so that planning can call it. `folder` holds the
    corpora; the source files of a built corpus may be missing. `file_of` returns the configuration
    file that sets a dotted key.
    """
    built = (folder / corpus.name / "manifest.json").is_file()
    for key in ("files", "validation_files"):
        try:
            paths, targets = (
                expand_patterns(getattr(corpus.source, k), key=k)
                for k in (key, TRANSLATION_KEYS[key])
            )
            if key == "files" and len(paths) < corpus.parts:
                raise too_many_parts_error(corpus, files=len(paths))
            pairs = list(
                match_targets(
                    list(shorten_paths(paths).items()), targets, key=TRANSLATION_KEYS[key]
                )
            )
            nonempty = [
                has_documents(path, source=corpus.source, target=target)
                for (_, path), target in pairs
            ]
            if nonempty and not any(nonempty):
                found = f"{len(paths)} file(s), all empty"
                next_step = "put text there, or name other files"
                raise UserError(
                    "a source has no documents.",
                    file=paths[0],
                    key=f"source.{key}",
                    found=found,
                    next=next_step,
                )
        except UserError as error:
            if built and error.what in (MISSING, NO_MATCH):
                continue
            full_key = f"corpora.{corpus.name}.{error.facts.get('key', f'source.{key}')}"
            facts = {"data": error.facts.get("file")} | {
                label: text for label, text in error.facts.items() if label not in ("file", "key")
            }
            raise UserError(error.what, file=file_of(full_key), key=full_key, **facts) from None


def too_many_parts_error(corpus: CorpusSettings, files: int) -> UserError:
    """Return the error for a corpus that has more parts than source files."""
    what = "a corpus has more parts than source files."
    next_step = f"lower `parts` of the corpus {corpus.name}, or split its files"
    return UserError(
        what, key="parts", found=f"{corpus.parts} parts, {files} file(s)", next=next_step
    )


def _read_documents(
    source: SourceSettings, downloads: Path | None, key: str, part: tuple[int, int] | None
) -> Iterator[tuple[str | None, str]]:
    entries: dict[Path, dict[str, Any]] = {}
    if source.kind == "files":
        files = list_files(source, key)
        targets = expand_patterns(getattr(source, TRANSLATION_KEYS[key]), key=TRANSLATION_KEYS[key])
    else:
        manifest = _read_download_manifest(downloads)
        assert downloads is not None  # else the manifest is refused
        texts, translations = (
            {downloads / entry["name"]: entry for entry in manifest.get(name, ())}
            for name in (key, TRANSLATION_KEYS[key])
        )
        entries = texts | translations
        files = [(entry["name"], path) for path, entry in texts.items()]
        targets = list(translations)
    pairs = list(match_targets(files, targets, key=TRANSLATION_KEYS[key]))
    for (name, path), target in select_part(pairs, part):
        with ExitStack() as stack:
            file = stack.enter_context(_open_raw(path, downloads, entries.get(path)))
            translated = None
            if target is not None:
                translated = stack.enter_context(_open_raw(target, downloads, entries.get(target)))
            for number, text in enumerate(read_raw_file(file, source, translated)):
                yield text, f"{name}::{number}"


@contextmanager
def _open_raw(
    path: Path, downloads: Path | None, entry: dict[str, Any] | None
) -> Iterator[RawFile]:
    """Yield a source file: one of the user's by its path, and a downloaded one, which has an entry
    in the manifest of its folder, opened and checked.
    """
    if downloads is None or entry is None:
        yield RawFile(path)
        return
    with _open_download(downloads, entry) as checked:
        yield RawFile(path, checked)


def _read_download_manifest(downloads: Path | None) -> dict[str, Any]:
    if downloads is None:
        next_step = "--downloads results/downloads/NAME/manifest.json  (snakemake names it itself)"
        raise UserError(
            "the corpus has a remote source, and --downloads is missing.", next=next_step
        )
    path = downloads / "manifest.json"
    return read_record(path, what="manifest of the download", next=f"snakemake -f {path}")
