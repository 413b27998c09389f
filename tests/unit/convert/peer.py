"""Script for `tests.peers`: write documents with litdata or streaming, or read a folder with their
data sets.

pytest collects this file for its doctests, without these libraries.
"""

import json
import sys


def to_tensor(document):
    import torch

    return torch.tensor(document["ids"], dtype=getattr(torch, document["dtype"]))


def write_litdata(folder, documents, dtype, **options):
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    inputs = [{"ids": ids, "dtype": dtype} for ids in documents]
    options |= {"item_loader": TokensLoader(), "num_workers": 1}
    litdata.optimize(fn=to_tensor, inputs=inputs, output_dir=folder, **options)


def read_litdata(folder, block):
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    data = litdata.StreamingDataset(
        folder, item_loader=TokensLoader(block_size=block), shuffle=False
    )
    return [ids.tolist() for ids in data]


def write_mds(folder, documents, columns, dtype, **options):
    """Write the documents as the column `tokens`; other columns get the number of the document."""
    import numpy as np
    from streaming import MDSWriter

    with MDSWriter(out=folder, columns=columns, **options) as writer:
        for number, ids in enumerate(documents):
            array = np.array(ids, dtype)
            sample = {"tokens": array.tobytes() if columns["tokens"] == "bytes" else array}
            sample |= {
                name: number if columns[name] == "int" else f"{number}"
                for name in columns
                if name != "tokens"
            }
            writer.write(sample)


def read_mds(folder, kind):
    import streaming

    options = {"batch_size": 1, "shuffle": False} if kind == "StreamingDataset" else {}
    data = getattr(streaming, kind)(local=folder, **options)
    samples = data if kind == "StreamingDataset" else (data[number] for number in range(len(data)))
    return [sample["tokens"].tolist() for sample in samples]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    print("\n" + json.dumps(globals()[settings.pop("do")](**settings)))
