"""Benchmark of other libraries' readers on the same rows, each in its own process and Python environment."""

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.benchmark import peer_reader

#: peer → module whose import shows that it is installed
MODULES = {
    "datasets": "datasets",
    "mosaicml-streaming": "streaming",
    "litdata": "litdata",
    "litdata, rows in file order": "litdata",
    "nanogpt": "numpy",
}
LIMIT_S = 600


class Peers:
    """Peers installed for the Python `interpreter`, reading `rows` [rows, T + 1]. Files are written below `folder`."""

    def __init__(self, rows: np.ndarray, folder: Path, interpreter: str = sys.executable):
        self._folder, self._interpreter = folder, interpreter
        self._rows = folder / "rows.npy"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(self._rows, rows.astype(np.int32))
        self.versions: dict[str, str] = {}
        self.left_out = self._find_missing()
        self.names = [peer for peer in MODULES if peer not in self.left_out]

    def measure(self, peer: str, order: np.ndarray, workers: int | None = None) -> dict[str, Any]:
        """Open the peer and read `order` [batches, n]. Returns `open_s`, `batch_s` and `memory_bytes`.

        With `workers`, batches are read through a DataLoader, whose first batch belongs to the opening. Raises
        RuntimeError if the peer fails or returns other tokens than the rows.
        """
        name, _, in_order = peer.partition(", ")
        if in_order:
            order = np.arange(order.size).reshape(order.shape) % len(np.load(self._rows, mmap_mode="r"))
        paths = self._folder / "order.npy", self._folder / name, self._folder / f"{name}.json"
        np.save(paths[0], order)
        script = [self._interpreter, peer_reader.__file__, name, str(self._rows), *map(str, paths)]
        script += [] if workers is None else [str(workers)]
        paths[2].unlink(missing_ok=True)
        done = subprocess.run(script, capture_output=True, text=True, timeout=LIMIT_S)
        if not paths[2].exists():
            raise RuntimeError(
                f"{peer} failed{'' if workers is None else f' with {workers} workers'}:\n{done.stderr[-2000:]}"
            )
        found = json.loads(paths[2].read_text())
        if found["crc32"] != _digest(np.load(self._rows, mmap_mode="r"), order):
            raise RuntimeError(f"{peer} returns other tokens than were written; its times are not used")
        self.versions[name] = found["version"]
        return {name: found[name] for name in ("open_s", "batch_s", "memory_bytes")}

    def _find_missing(self) -> dict[str, str]:
        """Return peer → reason why it cannot be imported."""
        try:
            command = [self._interpreter, "-c", _IMPORTS, *dict.fromkeys(MODULES.values())]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except OSError as error:
            raise UserError(
                "the Python of the peers cannot be started.",
                flag="--peers",
                file=self._interpreter,
                reason=error.strerror,
                next="pass the python of an environment with these libraries",
            ) from None
        reasons = json.loads(done.stdout.splitlines()[-1])
        return {peer: reasons[module] for peer, module in MODULES.items() if reasons[module]}


#: script that imports the named modules, and prints errors as one line of JSON
_IMPORTS = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        import torch
        importlib.import_module(name)
        found[name] = ""
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""


def _digest(rows: np.ndarray, order: np.ndarray) -> int:
    """Return the CRC-32 of inputs and labels of all batches, as `peer_reader` computes it."""
    digest = 0
    for indices in order:
        wide = rows[indices].astype(np.int64)
        digest = zlib.crc32(np.ascontiguousarray(wide[:, :-1]).data, digest)
        digest = zlib.crc32(np.ascontiguousarray(wide[:, 1:]).data, digest)
    return digest
