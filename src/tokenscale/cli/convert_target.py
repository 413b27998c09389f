"""Where `convert` writes to, and what must not be lost there."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.data.stores.manifest import SingleFile, located, module_of
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FOREIGN


@dataclass(frozen=True)
class Target:
    """What to write: a store (in a folder, or as one file), or a foreign format."""

    path: Path
    store: StoreSettings | None = None
    single: SingleFile | None = None
    foreign: str | None = None
    command: str = ""  # what writes it again

    @property
    def module(self) -> ModuleType:
        """What writes it."""
        return importlib.import_module(FOREIGN[self.foreign]) if self.foreign else module_of(self.store.format)


def manifest_of(path: Path) -> Path:
    """Of a store: by its folder, its manifest, or the one Parquet file that it is."""
    return path.with_suffix(".manifest.json") if path.suffix == ".parquet" else located(path)[1]


def make_way(goal: Target, source: Path, kind: str, force: bool) -> None:
    """Refuse to write over what this command would not write itself, and, without --force, over anything."""
    path = goal.path
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise UserError("the target's folder is a file.", target=path, folder=parent, next="mend the path")
    ours = goal.module.written(path) if goal.foreign else [path]
    theirs = _files_of(source, kind)
    if {p.resolve() for p in ours} & {p.resolve() for p in theirs}:
        raise UserError("the target would replace its own source.", target=path, next="name another target")
    if goal.single:
        there = [path] if path.exists() else []
        known = manifest_of(path).is_file()
    elif goal.foreign:
        there = [p for p in ours if p.exists()]
        known = goal.module.recognises(path) if goal.foreign == "hf-datasets" else all(p.is_file() for p in there)
    else:
        there = [path] if path.exists() and (path.is_file() or any(_visible(path))) else []
        known = path.is_dir() and (path / "manifest.json").is_file()
        if known:  # a store's writer clears away files of tokens that it does not know
            files = read_json(path / "manifest.json", "manifest").get("files", [])
            known_names = {"manifest.json", "build.json", *(file["name"] for file in files)}
            strange = sorted(p.name for p in _visible(path) if p.name not in known_names)
            if strange:
                raise UserError(
                    "the target's folder holds more than a store.",
                    target=path,
                    found=", ".join(strange[:5]),
                    next="name another folder",
                )
    if there and not known:
        raise UserError(
            f"what lies at the target is no {goal.foreign or 'token store'}.",
            target=there[0],
            next="name another target; --force replaces only what is of the same kind",
        )
    if there and not force:
        raise UserError("something lies at the target already.", target=there[0], next="--force replaces it")


def _visible(folder: Path) -> Iterator[Path]:
    return (p for p in folder.iterdir() if not p.name.startswith("."))


def _files_of(source: Path, kind: str) -> list[Path]:
    """What a source takes on disk, by its path: its folder, or its files."""
    return [source] if kind == "store" else importlib.import_module(FOREIGN[kind]).written(source)
