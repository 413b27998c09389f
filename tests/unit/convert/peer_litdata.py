"""Script for `tests.peers`: write documents with litdata's `optimize`, or read a folder with its StreamingDataset.

pytest collects this file for its doctests, without litdata.
"""

import json
import sys


def to_tensor(document):
    import torch

    return torch.tensor(document["ids"], dtype=getattr(torch, document["dtype"]))


def write(folder, documents, dtype="int64", loader=True, **options):
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    litdata.optimize(
        fn=to_tensor,
        inputs=[{"ids": ids, "dtype": dtype} for ids in documents],
        output_dir=folder,
        item_loader=TokensLoader() if loader else None,
        num_workers=1,
        **options,
    )


def read(folder, block):
    """The ids of each block of a folder."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    data = litdata.StreamingDataset(folder, item_loader=TokensLoader(block_size=block), shuffle=False)
    return [ids.tolist() for ids in data]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    print("\n" + json.dumps({"write": write, "read": read}[settings.pop("do")](**settings)))
