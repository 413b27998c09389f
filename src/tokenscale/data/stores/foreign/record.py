"""Record of a conversion: JSON next to exported files, with facts that their format lacks and the files' hashes."""

from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_manifest_file, write_json

VERSION = 1


def write_record(path: Path, hashes: dict[Path, str], facts: dict[str, Any]) -> None:
    """Write the record of exported files. `hashes` are file → SHA-256."""
    files = {file.name: sha256 for file, sha256 in hashes.items()}
    write_json(path, {"schema_version": VERSION, **facts, "files": files})


def read_record(path: Path) -> dict[str, Any] | None:
    """Read the record, or return None if there is none. Raises UserError for a broken record."""
    if not path.is_file():
        return None
    return read_manifest_file(path, "record of a conversion", VERSION, f"rm {path}", oldest=VERSION)


def check_record(record: dict[str, Any], hashes: dict[Path, str], path: Path) -> None:
    """Raise UserError if a file's hash is not in the record. `hashes` are file → SHA-256; files may be renamed."""
    known = record["files"]
    for name, sha256 in ((file.name, sha256) for file, sha256 in hashes.items()):
        if sha256 not in known.values():
            same = [known[n] for n in known if n == name] or [known[n] for n in known if n[-4:] == name[-4:]]
            raise UserError(
                "the source is not what its record describes.",
                record=path,
                file=name,
                expected=f"sha256 {same[0] if same else '(none of this kind)'}",
                found=f"sha256 {sha256}",
                next="convert it again; or remove the record, if the file was changed on purpose",
            )
