"""Engine gigatoken: byte-level and SentencePiece BPE, tens of times as fast as `tokenizers`."""

import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.data.tokenizers.base import Texts, join_ids, to_strings
from tokenscale.data.tokenizers.engines.engine import Unavailable, count_threads, load_fast_json

#: fewer texts, as in training, are encoded one by one: a batch costs about 0.5 ms for arrays and threads
FEW_TEXTS = 64
#: gigatoken's name for the pre-tokenizer pattern of Tekken
TEKKENS_PATTERN = "nemotron"


def open_engine(folder: Path, manifest: dict[str, Any]) -> "Gigatoken":
    """Open a tokenizer.json, or the ranks of Tekken. Raises Unavailable."""
    try:
        import gigatoken
    except ImportError as error:
        raise Unavailable(f"no package gigatoken for this platform ({error})") from None
    try:
        if manifest["kind"] == "tekken":  # loading ranks takes a third of the time
            ranks = str(folder / "ranks.tiktoken")
            tokenizer = gigatoken.Tokenizer.from_tiktoken(ranks, pretokenizer=TEKKENS_PATTERN)
            return Gigatoken(tokenizer, first_id=manifest["control_ids"])
        tokenizer = gigatoken.Tokenizer.from_json(load_fast_json(folder, manifest))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise Unavailable(f"gigatoken cannot read this tokenizer ({str(error).splitlines()[0]})") from None
    return Gigatoken(tokenizer)


class Gigatoken:
    """Engine that reads Arrow arrays without copying and releases the GIL while it encodes."""

    def __init__(self, tokenizer: Any, first_id: int = 0):
        self.version = version("gigatoken")
        self._tokenizer, self._first_id, self._lock = tokenizer, first_id, threading.Lock()

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts to (ids, lengths)."""
        if len(texts) == 0:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        with self._lock:  # comparison and writer may call at once; the package rejects concurrent calls
            if len(texts) < FEW_TEXTS and not isinstance(texts, pa.Array):
                ids, lengths = join_ids([self._tokenizer.encode(text).view(np.int32) for text in to_strings(texts)])
                return ids + np.int32(self._first_id), lengths
            inputs = _to_awkward(texts) if isinstance(texts, pa.Array) else to_strings(texts)
            layout = self._tokenizer.encode_batch(inputs, parallel=count_threads() > 1).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        ids = ids.view(np.int32)
        return (ids + np.int32(self._first_id) if self._first_id else ids), np.diff(offsets)


def _to_awkward(texts: pa.Array) -> Any:
    """Return an Arrow string array as an awkward array with 64-bit offsets, without copying the bytes."""
    import awkward

    if texts.null_count:
        raise ValueError("a document is null")
    texts = texts if pa.types.is_large_string(texts.type) else texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    first = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(0, dtype=np.uint8)
    characters = awkward.contents.NumpyArray(content, parameters={"__array__": "char"})
    index = awkward.index.Index64(first)
    return awkward.Array(awkward.contents.ListOffsetArray(index, characters, parameters={"__array__": "string"}))
