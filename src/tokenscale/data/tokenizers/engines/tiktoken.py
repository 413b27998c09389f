"""Engine tiktoken: ranks and a pattern. Encodes Tekken as mistral_common does, without importing mistral_common."""

import base64
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.tokenizers.base import Texts, join_ids, to_strings
from tokenscale.data.tokenizers.engines.engine import Unavailable, count_threads


def open_engine(folder: Path, manifest: dict[str, Any]) -> "Tiktoken":
    """Open a Tekken file. Raises Unavailable without the package."""
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
    """Engine of tiktoken. Its table has no control tokens, so their text stays text."""

    def __init__(self, encoding: Any, control_ids: int):
        self.version = version("tiktoken")
        self._encoding, self._control_ids = encoding, control_ids

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts to (ids, lengths)."""
        documents = to_strings(texts)
        if count_threads() > 1 and len(documents) > 1:
            found = self._encoding.encode_ordinary_batch(documents, num_threads=count_threads())
        else:
            found = [self._encoding.encode_ordinary(text) for text in documents]
        ids, lengths = join_ids(found)
        return ids + np.int32(self._control_ids), lengths
