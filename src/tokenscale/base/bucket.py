"""Objects of a bucket (`s3://…`) through fsspec.

The client reads credentials and endpoint where its own tools do (`AWS_PROFILE`,
`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `~/.aws`, or `FSSPEC_S3_ANON=true` for public buckets).
None of them is written to a record, and `Bucket` uploads no text that contains one.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tokenscale.base.errors import SECRET_NAME, UserError, first_line

#: scheme → the package with its file system
PACKAGES = {"s3": "s3fs"}
#: what `access_error` reports of errors that may be temporary
REQUEST_FAILED = "a request to the bucket failed."
#: shorter values, such as `false`, are settings and occur in any text
SHORTEST_SECRET = 12
#: suffixes of records and logs, which are searched for secrets; stores and weights are not
TEXTS = (".json", ".jsonl", ".diff", ".txt", ".log")


class Bucket:
    """Objects below an address `s3://BUCKET/PREFIX`. Keys are relative to it. An object appears
    complete or not at all.

    All methods raise UserError with the client's own reason.
    """

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self._root = self.address.split("://", 1)[1]
        # other machines write here, too: listings are not cached
        self._system = open_system(
            address,
            extra="cloud",
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return key → bytes of the objects below a prefix, which ends with `/` or is empty."""
        with self._errors(prefix):
            found = self._system.find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        return {
            name.removeprefix(f"{self._root}/"): int(facts["size"]) for name, facts in found.items()
        }

    def read(self, key: str) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        with self._errors(key):
            try:
                return self._system.cat_file(f"{self._root}/{key}")
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        """Write a small object. Raises UserError if it contains a secret."""
        _check_for_secrets(key, data)
        with self._errors(key):
            self._system.pipe_file(f"{self._root}/{key}", data)

    def upload(self, path: Path, key: str) -> None:
        """Upload a file. Text is read whole and checked for secrets."""
        if path.suffix in TEXTS:
            return self.write(key, path.read_bytes())
        with self._errors(key):
            self._system.put_file(str(path), f"{self._root}/{key}")
        return None

    def download(self, key: str, file: IO[bytes]) -> None:
        """Download an object into an empty file."""
        with self._errors(key):
            self._system.get_file(f"{self._root}/{key}", f"/dev/fd/{file.fileno()}")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        names = [f"{self._root}/{key}" for key in keys]
        if names:
            with self._errors(names[0]):
                self._system.rm(names)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # errors of the clients have no common base but Exception
            raise access_error(f"{self.address}/{key}", error) from None


def open_system(address: str, extra: str, **options: Any) -> Any:
    """Return the file system of an address. Raises UserError if its package, part of our `extra`,
    is missing.
    """
    scheme = address.partition("://")[0]
    try:
        import fsspec

        return fsspec.filesystem(scheme, **options)
    except ImportError:
        what = f"{scheme}:// addresses need the package {PACKAGES[scheme]}, which is missing."
        raise UserError(what, address=address, next=f'pip install "tokenscale[{extra}]"') from None


def access_error(address: str, error: Exception) -> UserError:
    """Return the error of a client as a message."""
    reason = first_line(error)
    if isinstance(error, FileNotFoundError):
        what = "the bucket has no such file."
        following = "correct the address, or list the bucket with its own client"
        named = address.split("://", 1)[1].partition("/")[2].partition("*")[0]
        if not named or re.search("bucket does not exist|nosuchbucket", reason, re.IGNORECASE):
            what = "there is no such bucket."
            following = "correct the name, or set AWS_ENDPOINT_URL of its server"
    elif isinstance(error, PermissionError) or type(error).__name__ in (
        "NoCredentialsError",
        "ProfileNotFound",
    ):
        what = "the bucket refuses access."
        following = (
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
            "FSSPEC_S3_ANON=true if public"
        )
    else:
        what = REQUEST_FAILED
        following = (
            "check network and AWS_ENDPOINT_URL; the same command goes on where this one ended"
        )
    return UserError(
        what, address=address, reason=f"{type(error).__name__}: {reason}", next=following
    )


def _check_for_secrets(key: str, data: bytes) -> None:
    for name, value in os.environ.items():
        if not SECRET_NAME.search(name) or len(value) < SHORTEST_SECRET or os.path.exists(value):
            continue
        if value.encode("utf-8", "surrogateescape") in data:
            what = "a file contains a secret and is not uploaded."
            following = "remove it from the file"
            raise UserError(what, file=key, found=f"the value of {name}", next=following)
