"""Files written whole or not at all, canonical JSON, hashes."""

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenscale.errors import UserError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, synced and renamed to it on success, removed on failure.

    Readers see the old file or the whole new one, never a part.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock while the block runs; the operating system releases it when the process dies.

    Raises UserError when another process holds it, naming that process. The lock file is left behind, empty of meaning.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{what} is being written by another process.",
                lock=path,
                owner=file.read().strip() or "unknown",
                next="wait for it, or end it",
            ) from None
        except OSError as error:  # Lustre mounted without -o flock, for one
            raise UserError(
                f"{what} cannot be locked here.",
                lock=path,
                reason=error.strerror,
                next="use a file system with locks (`python -m tokenscale doctor` tries them)",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically, UTF-8, newlines as given."""
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON for people and machines: sorted keys, two spaces, a newline at the end; equal values, equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path, what: str = "file", next: str | None = None) -> Any:
    """Read a JSON file; a missing or broken one is a user's error that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"the {what} is missing.", path=path, next=next) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the {what} is not readable JSON.", path=path, reason=error, next=next) from None


def canonical_json(value: Any) -> str:
    """One line of JSON, equal for equal values: sorted keys, no spaces, no NaN.

    >>> canonical_json({"b": 1, "a": [1.5, None]})
    '{"a":[1.5,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
