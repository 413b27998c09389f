"""Files against the list that names them: one walker for stores, corpora, runs, tables and
reports.
"""

import hashlib
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_relative_path, naming, open_inside, read_file

#: list of checksums in the folder of a report
SUMS = "SHA256SUMS"
#: what is wrong with a file that is not listed
UNLISTED = "not in any manifest"


@contextmanager
def open_checked(
    folder: Path, name: str, size: int, sha256: str | None = None, *, what: str, next: str
) -> Iterator[BufferedReader]:
    """Open a file that a manifest names, below the manifest's folder, and check it: what is read is
    then what was checked, whatever the name leads to meanwhile.

    Raises UserError if the file is missing or has another size, or another hash if one is given,
    and for a name that leads out of the folder or through a link.
    """
    opened = _open_listed(folder, name, what=what, size=size, next=next)
    with naming(folder / name), open(opened, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise changed_error(
                f"a file of the {what}",
                file=folder / name,
                expected=f"{size:,} bytes  (manifest.json)",
                found=f"{found:,} bytes",
                next=next,
            )
        if sha256 is not None:
            check_hash(file, sha256, path=folder / name, what=what, next=next)
        yield file


def check_hash(file: BufferedReader, sha256: str, *, path: Path, what: str, next: str) -> None:
    """Raise UserError if an open file has another hash. It is then read from its beginning."""
    with naming(path):
        found = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    if found != sha256:
        raise changed_error(
            f"a file of the {what}",
            file=path,
            expected=f"sha256 {sha256}  (manifest.json)",
            found=f"sha256 {found}",
            next=next,
        )


def _open_listed(folder: Path, name: str, what: str, size: int, next: str) -> int:
    """Return the descriptor of a file that a manifest names; raise as `open_checked` does."""
    facts = {"file": folder / name, "expected": f"{size:,} bytes"}
    try:
        return open_inside(folder, name)
    except FileNotFoundError:
        raise UserError(f"a file of the {what} is missing.", **facts, next=next) from None
    except ValueError as error:
        what = f"a file of the {what} is not in its folder."
        raise UserError(what, **facts, reason=error, next=next) from None


def check_file(
    folder: Path, name: str, size: int, sha256: str | None = None, *, what: str, next: str
) -> None:
    """Raise UserError unless a file is as `open_checked` wants it."""
    with open_checked(folder, name, size, sha256, what=what, next=next):
        pass


def changed_error(
    what: str, file: Path, expected: str | None, found: str, next: str, **place: str
) -> UserError:
    """Return the error for content with another hash or size than when it was written."""
    return UserError(
        f"{what} has changed.", file=file, **place, expected=expected, found=found, next=next
    )


def walk(
    folder: Path, files: Iterable[dict[str, Any]], beside: Container[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (name, what is wrong) of each listed file that is missing or changed, and of each file
    that is not listed.

    A listed file has a `name` below the folder, `sha256` (or None), and where it is known `bytes`.
    `beside` are entries of the folder that no list has to name; None: anything may lie beside the
    listed files.
    """
    known = set[str]()
    for file in files:
        try:
            parts = check_relative_path(name := file["name"]).split("/")
        except ValueError:
            yield str(name), "a name that leads out of the folder"
            continue
        known |= {"/".join(parts[: n + 1]) for n in range(len(parts))}
        if fault := _compare(folder, name, size=file.get("bytes"), sha256=file["sha256"]):
            yield name, fault
    if beside is not None:
        for path in _entries(folder, known):
            name = path.relative_to(folder).as_posix()
            if name.split("/")[0] not in beside:
                yield name, UNLISTED


def _compare(folder: Path, name: str, size: int | None, sha256: str | None) -> str | None:
    try:
        with open(open_inside(folder, name), "rb") as file:
            there = os.fstat(file.fileno()).st_size
            if size is not None and there != size:
                return f"changed: {there:,} bytes, listed {size:,} bytes"
            if sha256 is not None:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != sha256:
                    return f"changed: sha256 {found}, listed {sha256}"
    except (UserError, ValueError, OSError) as error:
        return _describe_fault(error)
    return None


def read_listed(folder: Path, name: str, sha256: str) -> bytes:
    """Return the content of a small file of a list. Raises ValueError with what is wrong with it, as
    `walk` says it.
    """
    try:
        with open(open_inside(folder, name), "rb") as file:
            content = file.read()
    except (UserError, ValueError, OSError) as error:
        raise ValueError(_describe_fault(error)) from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"changed: sha256 {found}, listed {sha256}")
    return content


def _describe_fault(error: UserError | ValueError | OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return "no regular file, or behind a link"


def _entries(folder: Path, known: Container[str], below: str = "") -> Iterator[Path]:
    """Yield the entries that are not `known`, at any depth; the content of an unknown folder is not
    listed.
    """
    for path in sorted(folder.iterdir()):
        name = f"{below}{path.name}"
        if name not in known:
            yield path
        elif path.is_dir():
            yield from _entries(path, known, below=f"{name}/")


def read_sums(folder: Path) -> dict[str, str]:
    """File → SHA-256 as the folder's list has it. Raises UserError where there is no such list."""
    path = folder / SUMS
    if not path.is_file():
        raise UserError(
            "this is no report's folder: it has no list of checksums.",
            file=path,
            next="snakemake report",
        )
    lines = [
        line.split("  ", 1)
        for line in read_file(path).decode("utf-8", errors="replace").splitlines()
        if line
    ]
    if not all(len(line) == 2 and len(line[0]) == 64 for line in lines):
        raise UserError(
            "the list of checksums cannot be read.",
            file=path,
            expected="a SHA-256, two spaces, a name",
            next="snakemake -f results/report/SHA256SUMS",
        )
    return {name: sha256 for sha256, name in lines}
