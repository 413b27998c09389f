"""Folders of the parts of corpora and token stores."""

import shutil
from pathlib import Path


def part_folder(directory: Path, number: int) -> Path:
    return Path(directory) / "parts" / f"{number:05d}"


def remove_other_parts(directory: Path, parts: int) -> None:
    """Remove the parts of an earlier corpus or store of more parts."""
    known = {part_folder(directory, number) for number in range(parts)}
    for path in (Path(directory) / "parts").glob("*"):
        if path.is_dir() and path not in known:
            shutil.rmtree(path)
