"""Settings of the data and storage benchmarks."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.registry import FORMATS

Engine = Literal["gigatoken", "tokenizers", "tiktoken", "mistral-common"]


@dataclass(frozen=True)
class DataBenchmarkSettings:
    """Benchmark of tokenizing and reading in isolation: interleaved arms on one core."""

    __pydantic_config__ = STRICT

    sequence_length: int = option(1024, "tokens per sequence", ge=8, strict=True)
    rows: int = option(8, "sequences per batch", ge=1, strict=True)
    batches: int = option(16, "batches per arm and round", ge=1, strict=True)
    rounds: int = option(5, "rounds; every arm runs once per round", ge=1, strict=True)
    workers: tuple[int, ...] = option((), "numbers of DataLoader worker processes to measure, such as [0, 2]")
    engines: tuple[Engine, ...] = option(
        ("tokenizers",), "further engines for tokenizing on the fly, besides that of auto, if installed and exact"
    )


@dataclass(frozen=True)
class StorageBenchmarkSettings:
    """Benchmark of token stores: the same ids in each storage format, written and read in interleaved order."""

    __pydantic_config__ = STRICT

    formats: tuple[Literal[*FORMATS], ...] = option(  # type: ignore[valid-type]
        ("padded", "token-list", "packed"),
        "storage formats; each uses those of the options below that apply to it",
    )
    dtypes: tuple[Literal["int32", "int64", "uint32"], ...] = option(
        ("int32", "int64"), "integer types of the Parquet formats; other formats choose theirs by vocabulary size"
    )
    codecs: tuple[Literal["none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"], ...] = option(
        ("none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"), "compression of the Parquet formats"
    )
    row_group_rows: tuple[int, ...] = option((1000,), "rows per Parquet row group")
    engines: tuple[Engine, ...] = option(
        ("tokenizers",), "further engines for tokenizing on the fly, besides that of auto, if installed and exact"
    )
    sequence_length: int = option(1024, "tokens per sequence", ge=8, strict=True)
    documents: int | None = option(None, "number of first documents of the training split to use; null: all", ge=1)
    rows: int = option(8, "rows per read", ge=1, strict=True)
    single_rows: int = option(32, "rows to read one by one, without a cache of decoded rows", ge=1, strict=True)
    rounds: int = option(3, "rounds; every store is written and read once per round", ge=1, strict=True)

    @property
    def stores(self) -> tuple[StoreSettings, ...]:
        """All points of the design without duplicates: options that do not apply to a format are ignored.

        >>> [s.directory for s in StorageBenchmarkSettings(("packed", "token-list"), ("int64",), ("none",)).stores]
        ['packed', 'token-list-codec=none-dtype=int64']
        """
        levels: dict[str, tuple[Any, ...]] = {
            "codec": self.codecs,
            "dtype": self.dtypes,
            "row_group_rows": self.row_group_rows,
            "sequence_length": (self.sequence_length,),
        }
        found = {}
        for form in self.formats:
            names = [name for name in levels if name in StoreSettings.OPTIONS[form]]
            for values in itertools.product(*(levels[name] for name in names)):
                options = dict(zip(names, values, strict=True))
                if "codec" in options:
                    codec, _, level = options["codec"].partition("-")
                    options |= {"codec": codec} | ({"codec_level": int(level)} if level else {})
                store = StoreSettings(form, **options)
                found[store.directory] = store
        return tuple(found.values())
