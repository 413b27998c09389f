"""What most people write: a tokenizer of `transformers`, a hundred documents a call, one Parquet
file at the end.

    python plain_script.py TEXT.parquet TOKENIZER.json OUTPUT.parquet

The baseline of `tests/benchmarks/pretokenize.py`. It imports nothing of tokenscale.
"""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

BATCH = 100


def main(text: str, tokenizer_file: str, output: str) -> None:
    """Tokenize the column `text` and write the column `tokens`."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
    texts = pq.read_table(text, columns=["text"])["text"].to_pylist()
    rows = []
    for first in range(0, len(texts), BATCH):
        rows += tokenizer(texts[first : first + BATCH], add_special_tokens=False)["input_ids"]
    pq.write_table(pa.table({"tokens": rows}), output, compression="snappy", row_group_size=1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
