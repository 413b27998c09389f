"""Parts of a corpus or a token store. One job builds several parts at a time, and skips finished
ones.

Snakemake deletes the manifests that a job declares when the job begins and when it fails. A part
that is built therefore leaves `finished.json` beside its manifest: the manifest, and a digest of
what the part was built from. A repeated job restores the manifests of these parts.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
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
from tokenscale.base.manifests import walk
from tokenscale.base.progress import Progress

RECORD = "finished.json"
Manifest = dict[str, Any]


def part_folder(directory: Path, number: int) -> Path:
    return Path(directory) / "parts" / f"{number:05d}"


def remove_surplus_parts(directory: Path, parts: int) -> None:
    """Remove the folders of parts from `parts` on, which an earlier build in more parts left."""
    known = {part_folder(directory, number) for number in range(parts)}
    for path in (Path(directory) / "parts").glob("*"):
        if path.is_dir() and path not in known:
            shutil.rmtree(path)


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

    def restore(self, list_files: Callable[[Manifest], Sequence[dict[str, Any]]]) -> bool:
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
        # records files have no hash: their readers check each record
        listed = {"sha256": None, **file}
        return not list(walk(self.directory, [listed]))


def complete_part(
    record: PartRecord,
    name: str,
    build: Callable[..., Manifest],
    *,
    list_files: Callable[[Manifest], Sequence[dict[str, Any]]],
    describe: Callable[[Manifest], str],
    hold: Callable[..., AbstractContextManager[Any]],
) -> None:
    """Build one part, unless an earlier job has finished it, and print its size.

    `build(directory=…, report=…)` writes the part and returns its manifest, whose size `describe`
    states. `hold(folder, what=…)` locks the folder of the part.
    """
    progress = Progress(name)
    with hold(record.directory, what=f"the {name}"):
        if record.restore(list_files):
            print(f"{name}: finished by an earlier job", flush=True)
            return
        manifest = build(directory=record.directory, report=progress)
        record.write()
    progress.close()
    print(f"{progress.line()}; {describe(manifest)}", flush=True)
