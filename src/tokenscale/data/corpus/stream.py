"""Source `stream`: documents of a Hugging Face dataset, streamed by its library without downloading
the files first.

Nothing but the built corpus is kept on disk. A dataset of the hub is pinned by its commit. Of a
local folder, the manifest records the hash of each file.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, first_line
from tokenscale.base.files import sha256_file
from tokenscale.data.corpus.columns import get_value, join_pairs, list_columns
from tokenscale.data.corpus.refusals import damaged, missing_column
from tokenscale.settings.data import SourceSettings

#: earlier versions of the library run scripts that a dataset contains
LEAST_VERSION = 4
#: what the reader changes in a text or leaves out
CHANGES = "columns that are not named are not read"


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """Return the manifest entry of the source. Raises UserError for a dataset of the hub without a
    commit.
    """
    facts = {
        name: getattr(source, name)
        for name in ("repository", "revision", "subset", "split", "validation_split")
    }
    facts = {"kind": "stream"} | {name: value for name, value in facts.items() if value is not None}
    folder = Path(str(source.repository))
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        facts["files"] = [
            {"name": str(path.relative_to(folder)), "sha256": sha256_file(path)} for path in files
        ]
    elif source.revision is None:
        what = "a dataset of the hub needs its commit."
        next_step = "set revision to its 40 hex digits, or name a folder"
        raise UserError(what, key="source.revision", dataset=source.repository, next=next_step)
    return facts


def documents(
    source: SourceSettings, downloads: Path | None = None
) -> Iterator[tuple[str | None, str]]:
    return islice(_stream(source, split=source.split, option="split"), source.maximum_documents)


def validation_documents(
    source: SourceSettings, downloads: Path | None = None
) -> Iterator[tuple[str | None, str]]:
    return _stream(source, split=str(source.validation_split), option="validation_split")


def _stream(source: SourceSettings, split: str, option: str) -> Iterator[tuple[str | None, str]]:
    dataset = _open_dataset(source, split, option=option)
    columns = list_columns(source)
    number = -1

    def rows() -> Iterator[tuple[str | None, ...]]:
        nonlocal number
        iterator = iter(dataset)
        while True:
            try:
                row = next(iterator, None)
            except Exception as error:  # errors of the library have no common base but Exception
                raise _stream_error(
                    source, what=f"document {number + 1:,} of split {split}", error=error
                ) from None
            if row is None:
                return
            number += 1
            yield tuple(
                _get_text(
                    row,
                    name,
                    option=key,
                    source=source,
                )
                for key, name in columns.items()
            )

    for text in join_pairs(rows(), path=Path(f"{source.repository}, split {split}")):
        yield text, f"{source.repository}/{split}::{number}"


def import_datasets(needed_for: object) -> Any:
    """Return the package `datasets`. Raises UserError if it is missing or older than
    `LEAST_VERSION`.
    """
    try:
        import datasets
    except ImportError:
        datasets = None
    if datasets is None or int(datasets.__version__.split(".")[0]) < LEAST_VERSION:
        what = "streamed sources and folders of Hugging Face data sets need the package datasets."
        found = "not installed" if datasets is None else f"version {datasets.__version__}"
        facts = {"found": found, "expected": f"version {LEAST_VERSION} or later"}
        raise UserError(
            what, dataset=needed_for, **facts, next='pip install "tokenscale[datasets]"'
        )
    datasets.disable_progress_bars()
    return datasets


def _open_dataset(source: SourceSettings, split: str, option: str) -> Any:
    datasets = import_datasets(source.repository)
    try:
        return datasets.load_dataset(
            source.repository,
            name=source.subset,
            split=split,
            revision=source.revision,
            streaming=True,
        )
    except Exception as error:
        if "split" in str(error):
            facts = {
                "key": f"source.{option}",
                "dataset": source.repository,
                "reason": first_line(error),
            }
            raise UserError(
                f"the dataset has no split {split!r}.", **facts, next="choose one of its splits"
            ) from None
        raise _stream_error(source, what=f"split {split}", error=error) from None


def _get_text(row: dict[str, Any], name: str, option: str, source: SourceSettings) -> str | None:
    assert source.repository is not None  # the kind needs it
    try:
        value = get_value(row, name)
    except (KeyError, TypeError):
        raise missing_column(
            Path(source.repository),
            name,
            names=list(row),
            option=option,
        ) from None
    if value is not None and not isinstance(value, str):
        facts = {"found": type(value).__name__, "expected": "a string", "key": f"source.{option}"}
        raise damaged(
            Path(source.repository),
            what="no text",
            name=name,
            **facts,
        )
    return value


def _stream_error(source: SourceSettings, what: str, error: Exception) -> UserError:
    dataset = f"{source.repository}{f' at {source.revision}' if source.revision else ''}"
    reason = f"{type(error).__name__}: {first_line(error)}"
    next_step = "check name, revision, subset, network and, for gated data, `hf auth login`"
    return UserError(
        "a dataset cannot be streamed.", dataset=dataset, file=what, reason=reason, next=next_step
    )
