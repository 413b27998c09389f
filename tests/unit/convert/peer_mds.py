"""Script for `tests.peers`: write documents with streaming's MDSWriter, or read a folder with its data sets.

pytest collects this file for its doctests, without streaming.
"""

import json
import sys


def write(folder, documents, columns, dtype, **options):
    """Write the documents as the column `tokens`; other columns get the number of the document."""
    import numpy as np
    from streaming import MDSWriter

    with MDSWriter(out=folder, columns=columns, **options) as writer:
        for number, ids in enumerate(documents):
            array = np.array(ids, dtype)
            sample = {"tokens": array.tobytes() if columns["tokens"] == "bytes" else array}
            sample |= {name: number if columns[name] == "int" else f"{number}" for name in columns if name != "tokens"}
            writer.write(sample)


def read(folder, kind):
    """The ids of each sample of a folder."""
    import streaming

    options = {"batch_size": 1, "shuffle": False} if kind == "StreamingDataset" else {}
    data = getattr(streaming, kind)(local=folder, **options)
    if kind == "StreamingDataset":
        return [sample["tokens"].tolist() for sample in data]
    return [data[number]["tokens"].tolist() for number in range(len(data))]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    print("\n" + json.dumps({"write": write, "read": read}[settings.pop("do")](**settings)))
