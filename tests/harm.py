"""Damage to the files of a folder, drawn from a seed."""

import json
import os
import random
import re
import shutil
from pathlib import Path

KINDS = (
    "flip",
    "overwrite",
    "truncate",
    "drop",
    "repeat",
    "insert",
    "zero",
    "swap",
    "append",
    "empty",
)
#: of text and JSON; in a file without such a place they are the first kind
OF_TEXT = ("number", "nan", "infinity", "value", "latin-1", "line", "name", "edit")
#: values at the edges of JSON and of what Python reads of it
EDGES = (b"1e999", b"-1e999", b"-0.0", b"1e-999", b"9223372036854775808", b"%d" % 2**1024)
EDGES += (b'"\\ud800"', b'{"a": 1, "a": 2}', b"[" * 2000 + b"]" * 2000)
OF_FILES = ("exchange", "remove", "folder", "copy")
#: what opening may wait for, or read for ever
SPECIAL = ("fifo", "device", "dangling")


def harmed(source: Path, target: Path, draw: random.Random) -> str:
    """A copy of a folder in which one file (of `OF_FILES` two) is damaged; what was done to
    which.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = sorted(p for p in target.rglob("*") if p.is_file() and p.name != ".lock")
    path = draw.choice(files)
    kind = draw.choice(KINDS + OF_FILES)
    harm(path, kind, draw.choice(files), draw)
    return f"{kind} {path.relative_to(target)}"


def harm(path: Path, kind: str, other: Path, draw: random.Random) -> None:
    """Damage a file; `exchange` damages the other one, too. The file is a new one: links to the old
    keep it whole.
    """
    data = path.read_bytes()
    path.unlink()
    if kind in ("exchange", "copy"):
        path.write_bytes(data if other == path else other.read_bytes())
        if kind == "exchange" and other != path:
            other.unlink()
            other.write_bytes(data)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in ("device", "dangling"):
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    elif kind != "remove":
        path.write_bytes(
            retyped(data, kind, draw) if kind in OF_TEXT else damaged(bytearray(data), kind, draw)
        )


def retyped(data: bytes, kind: str, draw: random.Random) -> bytes:
    """Text, often JSON, with one number, line or name changed, as a hand or a foreign program does
    it.
    """
    numbers = list(re.finditer(rb"(?<=[ :\[,])\d+(?=[\n,}\]])", data))
    names = list(re.finditer(rb'"[\w ./=-]+"', data))
    lines = data.split(b"\n")
    if kind == "edit":
        try:
            return json.dumps(edited(json.loads(data), draw), indent=2).encode()
        except ValueError:
            kind = "flip"
    if kind in ("number", "nan", "infinity", "value") and numbers:
        place = draw.choice(numbers)
        new = {
            "number": b"%d" % (int(place[0]) + 1),
            "nan": b"NaN",
            "infinity": b"-Infinity",
            "value": draw.choice(EDGES),
        }[kind]
    elif kind == "name" and names:
        place = draw.choice(names)
        new = draw.choice(
            [b'"../../x"', b'"/etc/passwd"', b'"$(touch owned)"', b'"a\\u0000b"', b'"x"']
        )
    elif kind == "latin-1" and names:
        place = draw.choice(names)
        new = b'"\xe9' + place[0][1:]
    elif kind == "line" and len(lines) > 2:
        at = draw.randrange(len(lines) - 1)
        return b"\n".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]])
    else:
        return damaged(bytearray(data), "flip", draw)
    return data[: place.start()] + new + data[place.end() :]


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
    """A value of JSON with one part of it replaced, or taken away: what a hand does that puts the
    hashes right.
    """
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        return rest if draw.random() < 0.2 else {**rest, key: edited(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], edited(value[at], draw), *value[at + 1 :]]
    return draw.choice(
        [
            None,
            True,
            -1,
            0,
            10**30,
            1.5,
            "",
            "x",
            "../x",
            "/etc/passwd",
            "a\0b",
            [],
            [1],
            {},
            {"a": 1},
        ]
    )
