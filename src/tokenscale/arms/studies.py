"""Data loaders of the source studies, reproduced as baselines.

Their two offline readers decode the whole table into memory at opening and convert each row to
Python objects and then to tensors; their online readers call the Hugging Face tokenizer for each
document. Two BOS per document and masking by id are reproduced as well. Sequences are stacked to a
batch, as a DataLoader without workers does.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.base.manifests import open_checked
from tokenscale.data.batches.batch import Batch, Inputs
from tokenscale.data.mixtures import manifest_path
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.tokenizers.base import read_tokenizer_file, read_tokenizer_manifest
from tokenscale.settings.run import RunSettings


class StudyBatches:
    """Endless batches."""

    def __init__(self, samples: Iterator[tuple[Any, Any]], rows: int):
        self._samples = samples
        self._rows = rows

    def next(self) -> Batch:
        """Return the next batch, without a digest of its order."""
        import torch

        pairs = [next(self._samples) for _ in range(self._rows)]
        tokens = torch.stack([a for a, _ in pairs])
        labels = torch.stack([b for _, b in pairs])
        useful = int((labels != IGNORED).sum())
        return Batch(tokens.numpy(), labels.numpy(), useful, tokens.numel(), order_digest=0)


def open_reader(run: RunSettings, inputs: Inputs) -> StudyBatches:
    """Open the studies' batches of one of the approaches `STUDIED`. Raises UserError without the
    package transformers.
    """
    rows = run.global_batch
    length = run.sequence_length
    tokenizer = inputs.require("tokenizer", run, user="arm studies")
    if run.approach == "padding-free":
        encode, bos, _ = _load_tokenizer(tokenizer)
        texts = _read_table(inputs.require("corpus", run, user="arm studies"))["text"]
        return StudyBatches(
            _stream_rows(
                lambda i: encode(str(texts[i].as_py())),
                count=len(texts),
                bos=bos,
                length=length,
            ),
            rows,
        )
    if run.approach == "padded":
        encode, _, pad = _load_tokenizer(tokenizer, padded_to=length + 1)
        texts = _read_table(inputs.require("corpus", run, user="arm studies"))["text"]
        return StudyBatches(
            _iterate_rows(lambda i: encode(str(texts[i].as_py())), count=len(texts), pad=pad), rows
        )
    made = read_tokenizer_manifest(tokenizer)
    table = _read_table(inputs.require("store", run, user="arm studies"))
    if run.approach == "token-list":
        lists = table["tokens"]
        return StudyBatches(
            _stream_rows(
                lambda i: lists[i].as_py()[:length],
                count=len(lists),
                bos=made["bos_id"],
                length=length,
            ),
            rows,
        )
    ids = table["input_ids"]
    masks = table["attention_mask"]

    def padded(i: int) -> list[int]:
        masks[i].as_py()  # decoded but not used, as in the study
        return ids[i].as_py()

    return StudyBatches(_iterate_rows(padded, count=len(ids), pad=made["pad_id"]), rows)


def _stream_rows(
    document: Callable[[int], list[int]], count: int, bos: int, length: int
) -> Iterator[tuple[Any, Any]]:
    """Yield rows cut from a buffer of documents, with a BOS before each in addition to the
    tokenizer's.
    """
    import torch

    buffer: list[int] = []
    i = 0
    while True:
        while len(buffer) < length + 1:
            buffer.append(bos)
            buffer += document(i % count)
            i += 1
        tokens = torch.tensor(buffer[:length], dtype=torch.long)
        labels = torch.tensor(buffer[1 : length + 1], dtype=torch.long)
        labels[tokens == bos] = IGNORED
        buffer = buffer[length:] if len(buffer) > length + 1 else []
        yield tokens, labels


def _iterate_rows(
    row: Callable[[int], list[int]], count: int, pad: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (tokens, labels) of rows in order, endlessly; labels that equal `pad` are ignored."""
    import torch

    i = 0
    while True:
        ids = torch.tensor(row(i % count), dtype=torch.long)
        labels = ids[1:].clone()
        labels[labels == pad] = IGNORED
        i += 1
        yield ids[:-1].clone(), labels


def _load_tokenizer(
    folder: Path, padded_to: int | None = None
) -> tuple[Callable[[str], list[int]], int, int]:
    """Load a `transformers` tokenizer that adds a BOS, like Mistral-Nemo's. Returns (text → ids,
    BOS id, pad id).
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise UserError(
            "package transformers is not installed.",
            arm="studies",
            next="pip install transformers, or leave the arm studies out",
        ) from None

    manifest = read_tokenizer_manifest(folder)
    name = "tokenizer.json" if "derived" in manifest else manifest["file"]["name"]
    content = read_tokenizer_file(folder, manifest, name)
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(content))
    fast.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    bos = fast.bos_token_id
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    if padded_to is None:
        return lambda text: fast.encode(text), bos, fast.pad_token_id
    options = {
        "max_length": padded_to,
        "padding": "max_length",
        "truncation": True,
        "padding_side": "right",
    }
    return lambda text: fast(text, **options)["input_ids"], bos, fast.pad_token_id


def _read_table(where: Path) -> pa.Table:
    """Read the Parquet files of a store, or of the training split of a corpus. Raises UserError for
    a missing or changed one.
    """
    path = manifest_path(where)
    manifest = read_json(path)
    files = manifest["splits"]["train"]["files"] if "splits" in manifest else manifest["files"]
    tables = []
    for file in files:
        opened = open_checked(
            path.parent,
            name=file["name"],
            size=file["bytes"],
            what="data of a benchmark",
            next=f"snakemake -f {path}",
        )
        with opened as shard:
            tables.append(pq.read_table(shard))
    return pa.concat_tables(tables)
