"""Settings of the benchmarks of storage and inference that an experiment may have."""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import option, settings_class
from tokenscale.settings.registry import FORMATS, TOKEN_FORMATS
from tokenscale.settings.run import RunSettings

Engine = Literal["gigatoken", "tokenizers", "tiktoken", "mistral-common"]


@settings_class
class StorageBenchmarkSettings:
    """Benchmark of token stores: the same ids in each storage format, written and read in
    interleaved order.
    """

    formats: tuple[Literal[*TOKEN_FORMATS], ...] = option(  # type: ignore[valid-type]
        ("padded", "token-list", "packed"),
        description="storage formats; each uses those of the options below that apply to it",
    )
    dtypes: tuple[Literal["int32", "int64", "uint32"], ...] = option(
        ("int32", "int64"),
        description="integer types of the Parquet formats; other formats choose theirs by vocabulary size",
    )
    codecs: tuple[
        Literal["none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"], ...
    ] = option(
        ("none", "snappy", "lz4", "zstd-1", "zstd-3", "zstd-9", "zstd-22"),
        description="compression of the Parquet formats",
    )
    row_group_rows: tuple[int, ...] = option((1000,), description="rows per Parquet row group")
    engines: tuple[Engine, ...] = option(
        ("tokenizers",), description="further engines for tokenizing, if installed and exact"
    )
    sequence_length: int = option(1024, description="tokens per sequence", ge=8)
    documents: int | None = option(
        None, description="number of first documents of the training split to use; null: all", ge=1
    )
    rows: int = option(8, description="rows per read", ge=1)
    single_rows: int = option(
        32, description="rows to read one by one, without a cache of decoded rows", ge=1
    )
    rounds: int = option(
        3, description="rounds; every store is written and read once per round", ge=1
    )

    @property
    def stores(self) -> tuple[StoreSettings, ...]:
        """All points of the design without duplicates: options that do not apply to a format are
        ignored.

        >>> [s.directory for s in StorageBenchmarkSettings(("packed", "token-list"), ("int64",), ("none",)).stores]
        ['packed', 'token-list-codec=none-dtype=int64']
        """
        levels: dict[str, tuple[Any, ...]] = {"codec": self.codecs, "dtype": self.dtypes}
        levels |= {
            "row_group_rows": self.row_group_rows,
            "sequence_length": (self.sequence_length,),
        }
        found = {}
        for form in self.formats:
            names = [name for name in levels if name in FORMATS[form].options]
            for values in itertools.product(*(levels[name] for name in names)):
                options = dict(zip(names, values, strict=True))
                if "codec" in options:
                    codec, _, level = options["codec"].partition("-")
                    options |= {"codec": codec} | ({"codec_level": int(level)} if level else {})
                store = StoreSettings(form, **options)
                found[store.directory] = store
        return tuple(found.values())


@settings_class
class SamplingSettings:
    """Sampling of the next token."""

    temperature: float = option(
        0.0,
        description="0: most likely token (greedy); 1: sample from the model's distribution",
        ge=0,
    )
    top_k: int = option(
        0, description="sample from this number of most likely tokens; 0: from all", ge=0
    )
    top_p: float = option(
        1.0,
        description="sample from the smallest set of tokens with this probability",
        gt=0,
        le=1,
    )
    seed: int = option(
        0, description="seed of sampling; each following prompt uses the next seed", ge=0
    )


@settings_class
class InferenceBenchmarkSettings:
    """Inference benchmark: generated texts, and the time per length with and without a key-value
    cache, interleaved.
    """

    prompts: tuple[str, ...] = option(
        ("Once upon a time,",), description="prompts to continue; repeated to the timed lengths"
    )
    sampling: tuple[SamplingSettings, ...] = option(
        (SamplingSettings(),), description="sampling settings of each continuation"
    )
    sample_tokens: int = option(50, description="largest number of tokens per continuation", ge=1)
    prompt_tokens: tuple[int, ...] = option(
        (16, 128), description="lengths of the timed prompts, including BOS"
    )
    new_tokens: tuple[int, ...] = option(
        (32, 128), description="numbers of new tokens to time for each prompt length"
    )
    batches: tuple[int, ...] = option((1,), description="batch sizes: prompts per call")
    rounds: int = option(5, description="rounds; every combination is timed once per round", ge=1)
    bf16: bool = option(
        False, description="true: weights and cache in bf16; false: in the format of the checkpoint"
    )

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Combinations of (batch size, prompt tokens, new tokens), without duplicates.

        >>> InferenceBenchmarkSettings(prompt_tokens=(8,), new_tokens=(4, 4), batches=(1, 2)).cells
        [(1, 8, 4), (2, 8, 4)]
        """
        return list(
            dict.fromkeys(itertools.product(self.batches, self.prompt_tokens, self.new_tokens))
        )

    def describe(self, models: int) -> str:
        """Describe the benchmark's size, for `plan`.

        >>> InferenceBenchmarkSettings(prompt_tokens=(8,), new_tokens=(4,), batches=(1, 2), rounds=5).describe(models=3)
        'inference: 3 models write 2 cells in 5 rounds, with a cache and without: 360 tokens; 3 answers to prompts'
        """
        tokens = 2 * self.rounds * models * sum(batch * new for batch, _, new in self.cells)
        answers = models * len(self.prompts) * len(self.sampling)
        what = (
            f"{models} models write {len(self.cells)} cells in {self.rounds} rounds, with a "
            "cache and without"
        )
        return f"inference: {what}: {tokens:,} tokens; {answers:,} answers to prompts"

    def problems(self, runs: list[RunSettings]) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong) for empty lists, and for runs whose models cannot generate
        such texts.
        """
        for name, least in {
            "prompts": 0,
            "sampling": 0,
            "prompt_tokens": 1,
            "new_tokens": 2,
            "batches": 1,
        }.items():
            values = getattr(self, name)
            if not values or least and min(values) < least:
                yield (
                    name,
                    "needs at least one value" + (f", each at least {least}" if least else ""),
                )
        if not runs:
            yield "", "the inference benchmark needs runs, but the experiment has none"
        if any(run.objective == "masked" for run in runs):
            yield "", "a model of objective masked cannot generate text: use causal"
        if not all(run.checkpoints.final for run in runs):
            yield "", "the runs do not save their weights: set runs: {checkpoints: {final: true}}"
        tokens = max(self.prompt_tokens, default=0) + max(self.new_tokens, default=0)
        if tokens > (length := min((run.sequence_length for run in runs), default=tokens)):
            yield "", f"{tokens} prompt and new tokens exceed the sequence length {length}"
