"""What the kinds `huggingface` and `bpe` share: a tokenizer.json, and the engines that read one."""

import json
from pathlib import Path
from typing import Any

from tokenscale.data.tokenizers.engined import EngineTokenizer
from tokenscale.data.tokenizers.engines import gigatoken, tokenizers

#: the fastest first
ENGINES = {"gigatoken": gigatoken, "tokenizers": tokenizers}


def load(path: Path, manifest: dict[str, Any], engine: str = "auto") -> EngineTokenizer:
    """The tokenizer of a tokenizer.json, without its template, truncation and padding."""

    def decode(ids: list[int]) -> str:
        tokenizer = tokenizers.library(manifest["kind"]).Tokenizer.from_file(str(path))
        return tokenizer.decode(ids, skip_special_tokens=False)

    return EngineTokenizer(path.parent, manifest, ENGINES, decode, engine)


def control_texts(path: Path) -> list[str]:
    """Text of the control tokens of a tokenizer.json."""
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    return [token["content"] for token in added if token.get("special")]
