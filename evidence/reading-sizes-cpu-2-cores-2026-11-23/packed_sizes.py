"""CPU time of a batch of 8 packed rows of 2,048 tokens in a store of 27 MB and in one of 1.9 GB, in interleaved rounds.

python packed_sizes.py FOLDER       writes the two stores into FOLDER, if they are not there, and prints the times
"""

import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from tokenscale.data.stores import packed
from tokenscale.data.stores.documents import Chunk, Origin
from tokenscale.data.stores.manifest import load_format, open_store
from tokenscale.settings.data import StoreSettings

STORE = StoreSettings("packed", sequence_length=2048)
SIZES = {"small": 20_000, "large": 1_400_000}
ROUNDS, BATCHES = 5, 2000


class Documents:
    """Random ids in documents of web-like lengths."""

    report = None

    def __init__(self, count: int):
        tokenizer = {"name": "ids", "kind": "ids", "file_sha256": ""}
        self.origin = Origin(tokenizer, 16384, 0, None, 1, {"text_sha256": ""})
        lengths = np.random.default_rng(0).lognormal(6.0, 1.0, count).astype(np.int64)
        self.lengths = np.clip(lengths, 8, 20_000)

    def __len__(self):
        return len(self.lengths)

    def confirm(self):
        pass

    def chunks(self, first, last):
        for begin in range(first, last, 2000):
            lengths = self.lengths[begin : min(begin + 2000, last)]
            yield Chunk(np.random.default_rng(begin).integers(2, 16384, lengths.sum(), dtype=np.int32), lengths)


def main(folder: Path) -> None:
    readers = {}
    for name, count in SIZES.items():
        path = folder / name
        if not (path / "manifest.json").exists():
            path.mkdir(parents=True)
            load_format("packed").write(STORE, Documents(count), path)
        start = time.perf_counter()
        reader = readers[name] = packed.PackedStore(path, open_store(path, STORE))
        print(f"{name}: opened in {1e3 * (time.perf_counter() - start):.1f} ms")
        reader._unseen[:] = 0  # as in every epoch but the first
    orders = {name: np.random.default_rng(3).permutation(len(reader)) for name, reader in readers.items()}
    buffers = {name: reader.buffers(8) for name, reader in readers.items()}
    groups, times = defaultdict(int), defaultdict(list)
    for _ in range(ROUNDS):
        for name, reader in readers.items():
            start = time.process_time()
            for _ in range(BATCHES // 8):
                first = groups[name] * 64 % (len(reader) - 64)
                groups[name] += 1
                plan = reader.plan(orders[name][first : first + 64].reshape(8, 8))
                for rows in plan.indices:
                    reader.will_read(rows)
                for i in range(8):
                    reader.read(plan, i, buffers[name])
            times[name].append(1e6 * (time.process_time() - start) / BATCHES)
    for name, each in times.items():
        print(f"{name}: {np.median(each):.1f} us a batch, rounds {', '.join(f'{value:.1f}' for value in each)}")
    ratios = np.divide(times["large"], times["small"])
    print(f"ratio {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
