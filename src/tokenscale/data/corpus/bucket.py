"""Source files in a bucket (`s3://…`), through fsspec: paths and globs, with resume."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokenscale.base.bucket import access_error, open_system
from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import read_json, write_json
from tokenscale.base.progress import Progress
from tokenscale.settings.data import SourceSettings

CHUNK_BYTES = 1 << 22


def resolve(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {address: local path}, the path within the bucket. Patterns are matched in the bucket.

    If the bucket cannot be listed, patterns are matched against `recorded`, the files of an earlier download of this
    corpus. Raises UserError for a pattern without a match, or if the bucket cannot be listed.
    """
    found: dict[str, str] = {}
    for pattern in files:
        matches = [pattern] if not _is_pattern(pattern) else _list_matches(pattern, recorded)
        found |= {address: address.split("://", 1)[1].partition("/")[2] for address in matches}
    if len(set(found.values())) < len(found):  # of several buckets
        return {address: address.split("://", 1)[1] for address in found}
    return found


def _list_matches(pattern: str, recorded: list[str]) -> list[str]:
    scheme, path = pattern.split("://", 1)
    system = open_system(pattern, "s3")
    try:
        matches = sorted(f"{scheme}://{name}" for name in system.glob(path))
    except Exception as error:  # errors of the clients have no common base but Exception
        matches = sorted(name for name in recorded if fnmatch(name, pattern))
        if not matches:
            raise access_error(pattern, error) from None
        print(f"{pattern}: the bucket cannot be listed; taking the files of the earlier download", flush=True)
    if not matches:
        folder = path.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0]
        try:
            there = [f"{scheme}://{name}" for name in system.ls(folder, detail=False)]
        except Exception as error:
            raise access_error(pattern, error) from None
        near = find_nearest(pattern, there)
        raise UserError(
            "no file of the bucket fits a source's pattern.",
            requested=pattern,
            has=", ".join(there[:8]) + (", …" if len(there) > 8 else ""),
            next=f"did you mean {near}?" if near else "correct `files` of the source",
        )
    return matches


def fetch(source: SourceSettings, address: str, target: Path, *, resumable: bool = True) -> None:
    """Download one file to `target`. A partial download is kept beside it and resumed, also by a later call.

    A partial download is resumed if the bucket reports the same ETag, size and time for the file. Raises UserError with
    the client's own reason.
    """
    system = open_system(address, "s3")
    part, record = target.with_name(target.name + ".part"), target.with_name(target.name + ".part.json")
    try:
        system.invalidate_cache()
        facts = system.info(address)
        size = int(facts["size"])
        version = {"size": size, "version": str(facts.get("ETag")), "modified": str(facts.get("LastModified"))}
        known = read_json(record, "record of a begun download") if record.exists() else None
        received = part.stat().st_size if part.exists() and known == version else 0
        if received > size:
            received = 0
        write_json(record, version)
        progress = Progress(address.rpartition("/")[2], total_bytes=size)
        with part.open("ab" if received else "wb") as file:
            while received < size:
                piece = _read_range(system, address, received, min(received + CHUNK_BYTES, size))
                if not piece:
                    raise EOFError(f"the file ended after {received:,} of {size:,} bytes")
                file.write(piece)
                received += len(piece)
                progress(0, len(piece))
        progress.close()
    except Exception as error:
        raise access_error(address, error) from None
    part.replace(target)
    record.unlink(missing_ok=True)


def _read_range(system: Any, address: str, start: int, end: int) -> bytes:
    return system.cat_file(address, start=start, end=end)


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")
