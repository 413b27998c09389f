"""Measure one peer's reader over rows of token ids. `peers.py` runs this script in the Python
environment of the peer.

Imports only the standard library, NumPy, torch and the peer.

    python peer_reader.py PEER ROWS.npy ORDER.npy FOLDER OUTPUT.json [WORKERS]

ROWS is int32 [rows, T + 1], ORDER int64 [batches, rows per batch]. The peer's files are written to
FOLDER if they are missing. Each batch is returned as inputs and labels, int64 torch tensors [n, T].
With WORKERS, batches are read through torch's DataLoader with that many processes, and the first
batch belongs to the opening.
"""

import json
import multiprocessing
import os
import sys
import time
import zlib
from importlib.metadata import version

import numpy as np
import torch


def datasets(rows, folder):
    """Return (function that opens the reader, version): Hugging Face datasets, Arrow on disk, torch
    format.
    """
    import datasets

    datasets.disable_progress_bars()
    if not os.path.isdir(folder):
        datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder)

    def open_reader():
        data = datasets.load_from_disk(folder).with_format("torch")
        return lambda indices: data[indices.tolist()]["input_ids"]

    return open_reader, version("datasets")


def mds(rows, folder):
    """Return (function that opens the reader, version): mosaicml-streaming, local MDS shards."""
    from streaming import MDSWriter, StreamingDataset

    if not os.path.isdir(folder):
        with MDSWriter(out=folder, columns={"tokens": f"ndarray:int32:{rows.shape[1]}"}) as writer:
            for row in rows:
                writer.write({"tokens": row})

    def open_reader():
        data = StreamingDataset(local=folder, shuffle=False, batch_size=1)

        def row(i):
            return torch.from_numpy(data[i]["tokens"].astype(np.int64))

        return lambda indices: torch.stack([row(i) for i in indices.tolist()])

    return open_reader, version("mosaicml-streaming")


def litdata(rows, folder):
    """Return (function that opens the reader, version): litdata's TokensLoader.

    Its fast path reads chunks in order; here it reads the same rows as all other peers.
    """
    from litdata import StreamingDataset
    from litdata.streaming import Cache, TokensLoader

    width = rows.shape[1]
    if not os.path.isdir(folder):
        cache = Cache(folder, chunk_size=width * 1024, item_loader=TokensLoader())
        for i, row in enumerate(rows):
            cache._add_item(i, torch.from_numpy(row.astype(np.int32)))
        cache.done()
        cache.merge()

    def open_reader():
        data = StreamingDataset(folder, item_loader=TokensLoader(block_size=width), shuffle=False)
        return lambda indices: torch.stack([data[i].long() for i in indices.tolist()])

    return open_reader, version("litdata")


def nanogpt(rows, folder):
    """Return (function that opens the reader, version): the access pattern of nanoGPT, reproduced.

    It maps the file again for each batch and makes two widened copies of each row.
    """
    path = folder + ".bin"
    if not os.path.isfile(path):
        rows.astype(np.uint32).tofile(path)
    width = rows.shape[1]

    def open_reader():
        def batch(indices):
            data = np.memmap(path, dtype=np.uint32, mode="r")
            starts = (indices * width).tolist()
            x = torch.stack(
                [torch.from_numpy(data[i : i + width - 1].astype(np.int64)) for i in starts]
            )
            y = torch.stack(
                [torch.from_numpy(data[i + 1 : i + width].astype(np.int64)) for i in starts]
            )
            return x, y

        return batch

    return open_reader, "pattern of its train.py"


PEERS = {"datasets": datasets, "mosaicml-streaming": mds, "litdata": litdata, "nanogpt": nanogpt}


class Batches(torch.utils.data.Dataset):
    """Dataset whose item k is batch k of the order.

    The peer is opened before the workers start, as its users do; streaming rejects opening it in
    each worker.
    """

    def __init__(self, batch, order):
        self.batch = batch
        self.order = order

    def __len__(self):
        return len(self.order)

    def __getitem__(self, k):
        return parts(self.batch(self.order[k]))


def parts(found):
    """Return (inputs, labels) of a batch."""
    return found if isinstance(found, tuple) else (found[:, :-1], found[:, 1:])


def main(peer, rows_file, order_file, folder, output, workers=None):
    torch.set_num_threads(1)
    rows = np.load(rows_file, mmap_mode="r")
    order = np.load(order_file)
    make, peer_version = PEERS[peer](np.asarray(rows), folder)
    before = _anonymous_bytes()
    start = time.perf_counter()
    batch = make()
    if workers is None:
        batches = (parts(batch(indices)) for indices in order)
    else:
        batches = iter(
            torch.utils.data.DataLoader(
                Batches(batch, order), batch_size=None, num_workers=int(workers)
            )
        )
    open_s = time.perf_counter() - start
    batch_s = []
    digest = 0
    for _ in range(len(order)):
        start = time.perf_counter()
        tokens, labels = next(batches)
        batch_s.append(time.perf_counter() - start)
        assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape
        digest = zlib.crc32(
            labels.contiguous().numpy(), zlib.crc32(tokens.contiguous().numpy(), digest)
        )
    if workers is not None:
        open_s += batch_s.pop(0)
    held = max(0, _anonymous_bytes() - before)
    with open(output, "w") as file:
        json.dump(
            {
                "version": peer_version,
                "open_s": open_s,
                "batch_s": batch_s,
                "crc32": digest,
                "memory_bytes": held,
            },
            file,
        )
    sys.stdout.flush()
    for worker in multiprocessing.active_children():
        worker.kill()  # on its own, each would notice only after five seconds
    os._exit(0)  # some peers leave threads and shared memory that deadlock at exit


def _anonymous_bytes():
    try:
        with open("/proc/self/status") as file:
            return 1024 * int(file.read().split("RssAnon:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
