"""Which files a source's names and globs stand for, and what to call them. Standard library only."""

import glob
import os
from pathlib import Path

from tokenscale.base.errors import UserError, nearest

MISSING = "a source file is missing."
NO_MATCH = "no file fits a source's pattern."


def expand(patterns: tuple[str, ...], key: str = "files") -> list[Path]:
    """The files that names and globs (`**` crosses folders) stand for, each once; UserError where one finds nothing."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        # a name that exists is that file, whatever characters it has
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        paths = [Path(match) for match in matches if os.path.isfile(match)]
        if not paths:
            raise _nothing(pattern, key, matches)
        found |= dict.fromkeys(paths)
    return list(found)


def named(paths: list[Path]) -> dict[str, Path]:
    """The files by what their paths do not share, so that no name tells where the data lie on this machine.

    >>> list(named([Path("/data/x/a.txt"), Path("/data/y/a.txt")]))
    ['x/a.txt', 'y/a.txt']
    """
    if not paths:
        return {}
    whole = [path.absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return {path.relative_to(common).as_posix(): path for path in whole}


def _nothing(pattern: str, key: str, matches: list[str]) -> UserError:
    folder = Path(pattern).parent
    if matches:
        return UserError(
            "a source names a folder, not files.",
            key=f"source.{key}",
            found=pattern,
            next=f"name its files: {Path(pattern) / '*.parquet'}",
        )
    there = sorted(p.name for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    near = nearest(Path(pattern).name, there)
    return UserError(
        MISSING if not glob.has_magic(pattern) else NO_MATCH,
        key=f"source.{key}",
        asked=pattern,
        folder=f"{folder} holds {len(there)} file(s)" if folder.is_dir() else f"{folder} does not exist",
        next=f"did you mean {near!r}?" if near else "put the data there, or mend the path",
    )
