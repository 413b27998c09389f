"""A file of what may be lost: the SHA-256 of what follows, a line of JSON, and tables as Arrow
streams.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis.tables import Tables
from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic


def read_kept(path: Path) -> tuple[dict[str, Any], Tables]:
    """Return (head, rows) of a file; both are empty of one that is missing or damaged."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest.decode() != _hash(content):
            return {}, {}
        line, _, body = content.partition(b"\n")
        names, head = json.loads(line)
        if not isinstance(head, dict):
            return {}, {}
        stream = io.BytesIO(body)
        return head, {name: pa.ipc.open_stream(stream).read_all() for name in names}
    except (OSError, ValueError, LookupError, TypeError):
        return {}, {}


def write_kept(path: Path, head: Mapping[str, Any], rows: Tables) -> None:
    """Write a file. One that cannot be written only costs time, and it need not survive a power cut:
    its digest tells.
    """
    body = io.BytesIO()
    for table in rows.values():
        with pa.ipc.new_stream(body, table.schema) as out:
            out.write_table(table)
    content = json.dumps([list(rows), head]).encode() + b"\n" + body.getvalue()
    with suppress(OSError, UserError), atomic(path, durable=False) as temporary:
        temporary.write_bytes(_hash(content).encode() + b"\n" + content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
