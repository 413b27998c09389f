"""tiktoken: ranks and a pattern. For Tekken, as mistral_common itself uses it, without importing that package."""

import base64
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.tokenizers.base import Texts, join_ids, to_strings
from tokenscale.data.tokenizers.engines.engine import Unavailable, count_threads


def open_engine(folder: Path, manifest: dict[str, Any]) -> "Tiktoken":
    """The engine of a file of Tekken's."""
    try:
        import tiktoken
    except ImportError:
        raise Unavailable("no package tiktoken") from None
    data = json.loads((folder / manifest["file"]["name"]).read_text(encoding="utf-8"))
    control_ids = data["config"]["default_num_special_tokens"]
    ordinary = manifest["vocabulary_size"] - control_ids
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][:ordinary]}
    encoding = tiktoken.Encoding("tekken", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    return Tiktoken(encoding, control_ids)


class Tiktoken:
    """See `engine.Engine`. Control tokens are no part of its table, so their text stays text."""

    def __init__(self, encoding: Any, control_ids: int):
        self.version = version("tiktoken")
        self._encoding, self._control_ids = encoding, control_ids

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths."""
        documents = to_strings(texts)
        if count_threads() > 1 and len(documents) > 1:
            found = self._encoding.encode_ordinary_batch(documents, num_threads=count_threads())
        else:
            found = [self._encoding.encode_ordinary(text) for text in documents]
        ids, lengths = join_ids(found)
        return ids + np.int32(self._control_ids), lengths
