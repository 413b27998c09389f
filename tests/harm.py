"""Damage to the files of a folder, drawn from a seed."""

import random
import shutil
from pathlib import Path

KINDS = ("flip", "overwrite", "truncate", "drop", "repeat", "insert", "zero", "swap", "append", "empty")
OF_FILES = ("exchange", "remove", "folder", "copy")


def harmed(source: Path, target: Path, draw: random.Random) -> str:
    """A copy of a folder in which one file (of `OF_FILES` two) is damaged; what was done to which."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = sorted(p for p in target.rglob("*") if p.is_file() and p.name != ".lock")
    path, other = draw.choice(files), draw.choice(files)
    kind = draw.choice(KINDS + OF_FILES)
    data = bytearray(path.read_bytes())
    if kind == "exchange":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "remove":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "copy":
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(damaged(data, kind, draw))
    return f"{kind} {path.relative_to(target)}"


def damaged(data: bytearray, kind: str, draw: random.Random) -> bytes:
    """The bytes with one kind of damage. They may still be equal: a byte swapped with itself."""
    n = len(data)
    if not n or kind == "empty":
        return b""
    first = draw.randrange(n)
    last = min(n, first + draw.randrange(1, 64))
    if kind == "flip":
        data[first] ^= 1 << draw.randrange(8)
    elif kind == "overwrite":
        for _ in range(draw.randrange(1, 20)):
            data[draw.randrange(n)] = draw.randrange(256)
    elif kind == "truncate":
        del data[first:]
    elif kind == "drop":
        del data[first:last]
    elif kind == "repeat":
        data[first:first] = data[first:last]
    elif kind == "insert":
        data[first:first] = draw.randbytes(draw.randrange(1, 9))
    elif kind == "zero":
        data[first:last] = bytes(last - first)
    elif kind == "swap":
        at = draw.randrange(n)
        data[first], data[at] = data[at], data[first]
    elif kind == "append":
        data += draw.randbytes(draw.randrange(1, 99))
    return bytes(data)


def edited(value: object, draw: random.Random) -> object:
    """A value of JSON with one part of it replaced, or taken away: what a hand does that puts the hashes right."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        return rest if draw.random() < 0.2 else {**rest, key: edited(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], edited(value[at], draw), *value[at + 1 :]]
    return draw.choice([None, True, -1, 0, 10**30, 1.5, "", "x", "../x", "/etc/passwd", "a\0b", [], [1], {}, {"a": 1}])
