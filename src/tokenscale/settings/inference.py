"""Settings of the inference benchmark of an experiment's trained models."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tokenscale.base.errors import UserError
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.run import RunSettings

KEY = "inference_benchmark"


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling of the next token."""

    __pydantic_config__ = STRICT

    temperature: float = option(0.0, "0: most likely token (greedy); 1: sample from the model's distribution", ge=0)
    top_k: int = option(0, "sample from this number of most likely tokens; 0: from all", ge=0, strict=True)
    top_p: float = option(1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1)
    seed: int = option(0, "seed of sampling; each following prompt uses the next seed", ge=0, strict=True)


@dataclass(frozen=True)
class InferenceBenchmarkSettings:
    """Inference benchmark: generated texts, and the time per length with and without a key-value cache, interleaved."""

    __pydantic_config__ = STRICT

    prompts: tuple[str, ...] = option(
        ("Once upon a time,",), "prompts to continue; repeated to the lengths that are timed"
    )
    sampling: tuple[SamplingSettings, ...] = option(
        (SamplingSettings(),), "sampling settings; each prompt is continued with each of them"
    )
    sample_tokens: int = option(50, "largest number of tokens per continuation", ge=1, strict=True)
    prompt_tokens: tuple[int, ...] = option((16, 128), "lengths of the timed prompts, including BOS")
    new_tokens: tuple[int, ...] = option((32, 128), "numbers of new tokens to time for each prompt length")
    batches: tuple[int, ...] = option((1,), "batch sizes: prompts per call")
    rounds: int = option(5, "rounds; every combination is timed once per round", ge=1, strict=True)
    bf16: bool = option(False, "true: weights and cache in bf16; false: in the format of the checkpoint")

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Combinations of (batch size, prompt tokens, new tokens), without duplicates.

        >>> InferenceBenchmarkSettings(prompt_tokens=(8,), new_tokens=(4, 4), batches=(1, 2)).cells
        [(1, 8, 4), (2, 8, 4)]
        """
        return list(dict.fromkeys(itertools.product(self.batches, self.prompt_tokens, self.new_tokens)))

    def describe(self, models: int) -> str:
        """Describe the benchmark's size, for `plan`.

        >>> InferenceBenchmarkSettings(prompt_tokens=(8,), new_tokens=(4,), batches=(1, 2), rounds=5).describe(models=3)
        'inference: 3 models write 2 cells in 5 rounds, with a cache and without: 360 tokens; 3 answers to prompts'
        """
        tokens = 2 * self.rounds * models * sum(batch * new for batch, _, new in self.cells)
        answers = models * len(self.prompts) * len(self.sampling)
        return (
            f"inference: {models} models write {len(self.cells)} cells in {self.rounds} rounds, with a cache and "
            f"without: {tokens:,} tokens; {answers:,} answers to prompts"
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield invalid fields as (field, what is wrong)."""
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("batches", 1)):
            values = getattr(self, name)
            if not values or min(values) < least:
                yield name, f"needs at least one number, each at least {least}"
        if not self.prompts or not self.sampling:
            yield "prompts" if not self.prompts else "sampling", "needs at least one"


def check_runs(settings: InferenceBenchmarkSettings, runs: list[RunSettings], file: str) -> None:
    """Raise UserError for runs that cannot be benchmarked: no saved weights, masked objective, too few positions."""
    where = {"file": file, "key": KEY}
    for field, text in settings.problems():
        raise UserError(
            "the settings do not fit together.",
            file=file,
            key=f"{KEY}.{field}",
            reason=text,
            next="change this key, or the one that it conflicts with",
        )
    if not runs:
        raise UserError("the inference benchmark needs runs, but the experiment has none.", **where, next="add `runs`")
    longest = max(settings.prompt_tokens) + max(settings.new_tokens)
    for run in runs:
        name = run.identity
        if run.objective == "masked":
            raise UserError(
                "a model of objective masked cannot generate text.", **where, run=name, next="use objective causal"
            )
        if not run.checkpoints.final:
            next_ = "runs: {checkpoints: {final: true}}"
            raise UserError("the runs do not save their weights.", **where, run=name, next=f"set {next_}")
        if longest > run.sequence_length:
            raise UserError(
                "prompt and new tokens exceed the sequence length.",
                **where,
                found=f"{max(settings.prompt_tokens)} + {max(settings.new_tokens)} tokens",
                expected=f"at most sequence_length, {run.sequence_length}, of {name}",
                next="reduce prompt_tokens or new_tokens, or raise sequence_length",
            )
