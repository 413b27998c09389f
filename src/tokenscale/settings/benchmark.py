"""Settings of the benchmarks."""

from dataclasses import dataclass

from tokenscale.settings.options import STRICT, option


@dataclass(frozen=True)
class DataBenchmarkSettings:
    """The isolated tokenise/read benchmark: how much of which shape, how often."""

    __pydantic_config__ = STRICT

    sequence_length: int = option(1024, "positions a row", ge=8, strict=True)
    rows: int = option(8, "rows a batch", ge=1, strict=True)
    batches: int = option(16, "batches a round and arm", ge=1, strict=True)
    rounds: int = option(5, "interleaved rounds", ge=1, strict=True)
