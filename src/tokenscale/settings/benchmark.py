"""Settings of the side-by-side measurements."""

import itertools
from dataclasses import dataclass
from typing import Literal

from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.registry import FORMATS

Engine = Literal["gigatoken", "tokenizers", "tiktoken", "mistral-common"]


@dataclass(frozen=True)
class DataBenchmarkSettings:
    """The isolated benchmark of tokenizing and reading: every arm, interleaved, on one core."""

    __pydantic_config__ = STRICT

    sequence_length: int = option(1024, "positions a row", ge=8, strict=True)
    rows: int = option(8, "rows a batch", ge=1, strict=True)
    batches: int = option(16, "batches an arm reads in one round", ge=1, strict=True)
    rounds: int = option(5, "rounds; every arm runs once in each", ge=1, strict=True)
    workers: tuple[int, ...] = option((), "worker processes of torch's DataLoader, for arms through it, such as [0, 2]")
    engines: tuple[Engine, ...] = option(
        ("tokenizers",), "what else tokenizes on the fly, beside the engine that auto takes; those here and exact"
    )


@dataclass(frozen=True)
class StorageBenchmarkSettings:
    """The benchmark of tokens at rest: the same ids in every way to store them, written and read in turns."""

    __pydantic_config__ = STRICT

    formats: tuple[Literal[*FORMATS], ...] = option(
        ("padded", "token-list", "packed", "archive"), "formats; each has those of the options below that it knows"
    )
    dtypes: tuple[Literal["int32", "int64", "uint32"], ...] = option(
        ("int32", "int64"), "integer types of the Parquet formats; the others take theirs by the vocabulary"
    )
    codecs: tuple[Literal["none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"], ...] = option(
        ("none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"), "compression of the Parquet formats"
    )
    row_group_rows: tuple[int, ...] = option((1000,), "rows a Parquet row group")
    levels: tuple[Literal["fast", "small", "smallest"], ...] = option(("fast",), "how small the format archive is made")
    engines: tuple[Engine, ...] = option(
        ("tokenizers",), "what else tokenizes on the fly, beside the engine that auto takes; those here and exact"
    )
    sequence_length: int = option(1024, "positions a row", ge=8, strict=True)
    documents: int | None = option(None, "the first so many documents of the training split; null: all", ge=1)
    rows: int = option(8, "rows that are read at a time", ge=1, strict=True)
    single_rows: int = option(32, "rows that are read one by one, without a cache of decoded ones", ge=1, strict=True)
    rounds: int = option(3, "rounds; every store is written and read once in each", ge=1, strict=True)

    @property
    def stores(self) -> tuple[StoreSettings, ...]:
        """Every point of the design, once: an option that a format does not know makes no further points of it.

        >>> [s.directory for s in StorageBenchmarkSettings(("packed", "token-list"), ("int64",), ("none",)).stores]
        ['packed', 'token-list-codec=none-dtype=int64']
        """
        levels = {"codec": self.codecs, "dtype": self.dtypes, "row_group_rows": self.row_group_rows}
        levels |= {"level": self.levels, "sequence_length": (self.sequence_length,)}
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
