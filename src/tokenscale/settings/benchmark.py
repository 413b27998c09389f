"""Settings of the side-by-side measurements."""

from dataclasses import dataclass
from typing import Literal

from tokenscale.settings.options import STRICT, option


@dataclass(frozen=True)
class DataBenchmarkSettings:
    """The isolated benchmark of tokenizing and reading: every arm, interleaved, on one core."""

    __pydantic_config__ = STRICT

    sequence_length: int = option(1024, "positions a row", ge=8, strict=True)
    rows: int = option(8, "rows a batch", ge=1, strict=True)
    batches: int = option(16, "batches an arm reads in one round", ge=1, strict=True)
    rounds: int = option(5, "rounds; every arm runs once in each", ge=1, strict=True)
    workers: tuple[int, ...] = option((), "worker processes of torch's DataLoader, for arms through it, such as [0, 2]")
    engines: tuple[Literal["gigatoken", "tokenizers", "tiktoken", "mistral-common"], ...] = option(
        ("tokenizers",), "what else tokenizes on the fly, beside the engine that auto takes; those here and exact"
    )
