"""What a disk may hold after the power fails, replayed from a recorded order of changes, syncs and
renames.

A recording follows a folder while code of this project changes it. Around each call of `os` that
renames, deletes or syncs, the whole folder is read, so that files written by C++ and Rust are seen,
too. Nothing is on the disk but what `fsync` put there: of a file its content at that time, of a
folder its list of names. After any event the disk may hold

- exactly that,
- that and any single later change of names, since a file system may write them in any order (with
  the folders that it is in),
- that and all later changes of names, with the content of files that were not synced lost.

A folder that was synced exists, with the folders above it: journals write the creation of a folder
before its names.
"""

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tokenscale
from tokenscale.base import files

SOURCE = Path(tokenscale.__file__).parent
HOOKED = ("rename", "replace", "unlink", "rmdir", "mkdir", "remove", "link")
#: not results: locks, and what says how far a run is
IGNORED = (".lock", "status.json")
#: files that nobody reads until they are renamed, or that are verified by hash before they are used
UNFINISHED = re.compile(r"(^|/)\.|\.(partial|old)/")


@dataclass(eq=False)
class Node:
    inode: tuple[int, int]
    names: "dict[str, Node] | None" = None


@dataclass(frozen=True)
class Event:
    """A change of names (`changes`: folder, name, node or None), or a sync of a node that has
    `content` or `names`.
    """

    changes: tuple[tuple[Node, str, Node | None], ...] = ()
    synced: Node | None = None
    content: bytes = b""
    site: str = ""


@dataclass
class Recording:
    """The events of a folder, beginning with one that is on the disk as it lies there."""

    root: Path
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self.top = Node(self._inode(self.root), {})
        self._scan()
        for node, path in list(self._walk()):
            self.events.append(
                Event(synced=node, content=path.read_bytes() if node.names is None else b"")
            )
        self.first = len(self.events)

    @contextmanager
    def on(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in (*HOOKED, "fsync")}

        def hook(name: str):
            def call(*arguments, **options):
                with self._lock:
                    self._scan()
                    try:
                        return real[name](*arguments, **options)
                    finally:
                        self._scan(one=True)

            return call

        def fsync(descriptor: int) -> None:
            with self._lock:
                self._scan()
                inode = os.fstat(descriptor)
                for node, path in self._walk():
                    if node.inode == (inode.st_dev, inode.st_ino):
                        content = path.read_bytes() if node.names is None else b""
                        self.events.append(Event((), node, content, _site()))

        for name in HOOKED:
            setattr(os, name, hook(name))
        os.fsync = fsync
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            self._scan()

    @staticmethod
    def _inode(path: Path) -> tuple[int, int]:
        stat = path.lstat()
        return stat.st_dev, stat.st_ino

    def _walk(self) -> Iterator[tuple[Node, Path]]:
        stack = [(self.top, self.root)]
        while stack:
            node, path = stack.pop()
            yield node, path
            stack += [(child, path / name) for name, child in (node.names or {}).items()]

    def _scan(self, *, one: bool = False) -> None:
        """Note the changes of names since the last scan: as one event, or else each file's or
        folder's as one.
        """
        known = {node.inode: node for node, _ in self._walk()}
        by_node: dict[int, list[tuple[Node, str, Node | None]]] = {}
        stack = [(self.top, self.root)]
        while stack:
            folder, path = stack.pop()
            found = {entry.name: entry for entry in os.scandir(path) if entry.name not in IGNORED}
            for name in [name for name in folder.names if name not in found]:
                by_node.setdefault(id(folder.names[name]), []).append((folder, name, None))
            for name, entry in found.items():
                stat = entry.stat(follow_symlinks=False)
                old = folder.names.get(name)
                if old is None or old.inode != (stat.st_dev, stat.st_ino):
                    node = known.get((stat.st_dev, stat.st_ino))
                    if node is None:
                        node = Node(
                            (stat.st_dev, stat.st_ino),
                            {} if entry.is_dir(follow_symlinks=False) else None,
                        )
                    by_node.setdefault(id(node), []).append((folder, name, node))
                if entry.is_dir(follow_symlinks=False):
                    stack.append(
                        (
                            known.get((stat.st_dev, stat.st_ino)) or by_node[id(node)][-1][2],
                            path / name,
                        )
                    )
        groups = list(by_node.values())
        for group in [[change for part in groups for change in part]] if one and groups else groups:
            self.events.append(Event(tuple(group)))
        for group in groups:
            for folder, name, node in group:
                if node is None:
                    folder.names.pop(name, None)
        for group in groups:
            for folder, name, node in group:
                if node is not None:
                    folder.names[name] = node

    def sites(self) -> set[str]:
        return {event.site for event in self.events[self.first :] if event.synced is not None}

    def disks(self, without: str | None = None) -> Iterator[tuple[dict[str, bytes], bool]]:
        """What the disk may hold after each event, each state once, and whether it is the one after
        the last event.
        """
        content: dict[Node, bytes] = {}
        names: dict[Node, dict[str, Node]] = {self.top: {}}
        pending: list[Event] = []
        seen = set()
        for number, event in enumerate(self.events):
            last = number == len(self.events) - 1
            if event.synced is None:
                pending.append(event)
            elif not event.site or event.site != without:
                node = event.synced
                content[node] = event.content
                if node.names is not None:
                    chosen = _put_down(node, pending)
                    pending = [change for change in pending if change not in chosen]
                    _apply(names, chosen)
            if number < self.first - 1:
                continue
            single = [
                [*_creations({above for above, _, _ in c.changes}, pending), c] for c in pending
            ]
            for later in [[], pending, *single]:
                tree = {node: dict(listed) for node, listed in names.items()}
                _apply(tree, later)
                disk = {
                    name: data
                    for name, data in _files(self.top, tree, content)
                    if not UNFINISHED.search(name)
                }
                key = (
                    tuple(sorted((name, id(data)) for name, data in disk.items())),
                    last and not later,
                )
                if key not in seen:
                    seen.add(key)
                    yield disk, last and not later


def _creations(folders: set[Node], pending: list[Event]) -> list[Event]:
    """The changes that created these folders and the folders above them."""
    below = set(folders)
    found = []
    for event in reversed(pending):
        if all(node is not None for _, _, node in event.changes) and any(
            node in below for _, _, node in event.changes
        ):
            below |= {above for above, _, _ in event.changes}
            found.insert(0, event)
    return found


def _put_down(folder: Node, pending: list[Event]) -> list[Event]:
    """The changes that a sync of a folder writes: those of its names, and those that created it."""
    created = _creations({folder}, pending)
    return [
        event
        for event in pending
        if event in created or any(above is folder for above, _, _ in event.changes)
    ]


def _apply(names: dict[Node, dict[str, Node]], events: list[Event]) -> None:
    for event in events:
        for folder, name, node in sorted(event.changes, key=lambda change: change[2] is not None):
            listed = names.setdefault(folder, {})
            if node is None:
                listed.pop(name, None)
            else:
                listed[name] = node


def _files(
    node: Node, names: dict[Node, dict[str, Node]], content: dict[Node, bytes], path: str = ""
):
    for name, child in names.get(node, {}).items():
        if child.names is None:
            yield f"{path}{name}", content.get(child, b"")
        else:
            yield from _files(child, names, content, f"{path}{name}/")


def _site() -> str:
    """The line that asked for this sync: within `base/files.py` also the line of its caller, but
    for `atomic`.
    """
    frame = sys._getframe(2)
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and frame.f_code is not files.sync.__code__:
            found.append(f"{path.relative_to(SOURCE)}:{frame.f_lineno}")
            if path != SOURCE / "base/files.py" or frame.f_code.co_name == "atomic":
                break
        frame = frame.f_back
    return " < ".join(found)


def lay(disk: dict[str, bytes], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in disk.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
