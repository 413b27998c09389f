"""Parts of a corpus or a token store. One job builds several parts at a time, and skips finished
ones.

Snakemake deletes the manifests that a job declares when the job begins and when it fails. A part
that is built therefore leaves `finished.json` beside its manifest: the manifest, and a digest of
what the part was built from. A repeated job restores the manifests of these parts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    read_json,
    read_record,
    sha256_file,
    sha256_text,
    write_json,
    write_sealed,
)

RECORD = "finished.json"


def digest_inputs(files: Iterable[Path], **facts: Any) -> str:
    """Return a digest of the content of input files and of the settings of a part."""
    hashes = {str(file): sha256_file(file) for file in files}
    return sha256_text(canonical_json({"files": hashes, **facts}))


@dataclass(frozen=True)
class PartRecord:
    """Record of a finished part in the folder of the part."""

    directory: Path
    #: what the part is built from, as `digest_inputs` returns it
    built_from: str

    def restore(self, list_files: Callable[[dict[str, Any]], Sequence[dict[str, Any]]]) -> bool:
        """Write the manifest of a finished part again. Returns False for a part that is missing,
        damaged or built from something else.

        `list_files` returns the entries of a manifest's files: name, bytes, sha256.
        """
        try:
            record = read_record(self.directory / RECORD, what="record of a finished part")
        except UserError:
            return False
        if record["built_from"] != self.built_from:
            return False
        manifest = record["manifest"]
        if not all(self._is_whole(file) for file in list_files(manifest)):
            return False
        write_json(self.directory / "manifest.json", value=manifest)
        return True

    def write(self) -> None:
        """Record that the part, whose manifest is written, is finished."""
        manifest = read_json(self.directory / "manifest.json", what="manifest of the part")
        record = {"built_from": self.built_from, "manifest": manifest}
        write_sealed(self.directory / RECORD, record=record)

    def _is_whole(self, file: dict[str, Any]) -> bool:
        path = self.directory / file["name"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return False
        # records files have no hash: their readers check each record
        return "sha256" not in file or sha256_file(path) == file["sha256"]
