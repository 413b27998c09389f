"""Time of a batch of packed rows in random order: this project, whole and in parts, and other libraries' readers.

    PYTHONPATH=. python peers.py FOLDER PEERS_PYTHON NAME=STORE [NAME=STORE …]

STORE is the folder of a packed store; NAME ends with its size. Three interleaved rounds; prints medians.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from benchmarks.peers import Peers

from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.settings.data import StoreSettings

BATCHES, ROWS, ROUNDS, PLANNED = 200, 8, 3, 8


def time_store(folder: Path, order: np.ndarray) -> float:
    """Median milliseconds of a batch, after one pass over these rows, which verifies them."""
    store = PackedStore(folder, open_store(folder, StoreSettings("packed", sequence_length=2048)))
    buffers, found = store.buffers(ROWS), []
    for number in range(2):
        for first in range(0, len(order), PLANNED):
            start = time.perf_counter()
            plan = store.plan(order[first : first + PLANNED])
            for i in range(len(plan.indices)):
                store.read(plan, i, buffers)
            if number:
                found.append((time.perf_counter() - start) / len(plan.indices))
    return 1e3 * statistics.median(found)


def main() -> None:
    work, interpreter, *named = sys.argv[1:]
    stores = dict(name.split("=", 1) for name in named)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in stores}
    peers = {}
    for name, folder in stores.items():
        store = PackedStore(Path(folder), open_store(Path(folder), StoreSettings("packed", sequence_length=2048)))
        if "parts" not in name:
            peers[name] = Peers(store.stored(np.arange(len(store))), Path(work) / name, interpreter)
    for number in range(ROUNDS):
        for name, folder in stores.items():
            rows = json.loads((Path(folder) / "manifest.json").read_text())["rows"]
            order = np.random.default_rng(number).integers(0, rows, (BATCHES, ROWS))
            times[name].setdefault("tokenscale", []).append(time_store(Path(folder), order))
            for peer in peers[name].names if name in peers else ():
                found = peers[name].measure(peer, order)
                times[name].setdefault(peer, []).append(1e3 * statistics.median(found["batch_s"]))
    for name, measured in times.items():
        for what, values in measured.items():
            middle = statistics.median(values)
            print(f"{name:16} {what:32} {middle:8.3f} ms ({min(values):.3f} – {max(values):.3f})", flush=True)


if __name__ == "__main__":
    main()
