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

from tokenscale.base.files import read_json
from tokenscale.base.manifests import open_checked
from tokenscale.data.stores.documents import IGNORED

ARMS = (
    "studies' padding-free",
    "studies' padded",
    "studies' token-list",
    "studies' pretokenized-padded",
)
#: storage settings of their files
STORAGE = {"codec": "snappy", "dtype": "int64"}


def explain_missing() -> str | None:
    """Return why these arms cannot run here, or None."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "package transformers is not installed"
    return None


class StudyBatches:
    """Endless batches of (tokens, labels), torch int64 [rows, T], with the number of useful
    tokens.
    """

    def __init__(self, samples: Iterator[tuple[Any, Any]], rows: int):
        self._samples = samples
        self._rows = rows

    def next(self) -> tuple[Any, Any, int, int]:
        """Return (tokens, labels, useful tokens, all tokens)."""
        import torch

        pairs = [next(self._samples) for _ in range(self._rows)]
        tokens = torch.stack([a for a, _ in pairs])
        labels = torch.stack([b for _, b in pairs])
        return tokens, labels, int((labels != IGNORED).sum()), tokens.numel()


def open_arm(
    arm: str,
    rows: int,
    sequence_length: int,
    corpus: Path,
    tokenizer: Path,
    stores: dict[str, Path],
):
    """Open the batches of an arm. `stores` has the folders of the `padded` and `token-list`
    files.
    """
    length = sequence_length
    if arm == "studies' padding-free":
        encode, bos, _ = _load_tokenizer(tokenizer)
        texts = _read_table(corpus)["text"]
        return StudyBatches(
            _stream_rows(
                lambda i: encode(str(texts[i].as_py())),
                count=len(texts),
                bos=bos,
                length=length,
            ),
            rows,
        )
    if arm == "studies' padded":
        encode, _, pad = _load_tokenizer(tokenizer, padded_to=length + 1)
        texts = _read_table(corpus)["text"]
        return StudyBatches(
            _iterate_rows(lambda i: encode(str(texts[i].as_py())), count=len(texts), pad=pad), rows
        )
    bos, pad = _read_ids(tokenizer)
    if arm == "studies' token-list":
        lists = _read_table(stores["token-list"])["tokens"]
        return StudyBatches(
            _stream_rows(
                lambda i: lists[i].as_py()[:length],
                count=len(lists),
                bos=bos,
                length=length,
            ),
            rows,
        )
    table = _read_table(stores["padded"])
    ids = table["input_ids"]
    masks = table["attention_mask"]

    def padded(i: int) -> list[int]:
        masks[i].as_py()  # decoded but not used, as in the study
        return ids[i].as_py()

    return StudyBatches(_iterate_rows(padded, count=len(ids), pad=pad), rows)


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
    from transformers import PreTrainedTokenizerFast

    from tokenscale.data.tokenizers.base import read_tokenizer_file, read_tokenizer_manifest

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


def _read_ids(folder: Path) -> tuple[int, int]:
    from tokenscale.data.tokenizers.base import read_tokenizer_manifest

    manifest = read_tokenizer_manifest(folder)
    return manifest["bos_id"], manifest["pad_id"]


def _read_table(folder: Path) -> pa.Table:
    """Read the Parquet files of a store, or of the training split of a corpus. Raises UserError for
    a missing or changed one.
    """
    path = folder / "manifest.json"
    manifest = read_json(path)
    files = manifest["splits"]["train"]["files"] if "splits" in manifest else manifest["files"]
    tables = []
    for file in files:
        opened = open_checked(
            folder,
            name=file["name"],
            size=file["bytes"],
            what="data of a benchmark",
            next=f"snakemake -f {path}",
        )
        with opened as shard:
            tables.append(pq.read_table(shard))
    return pa.concat_tables(tables)
