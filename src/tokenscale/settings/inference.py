"""What an experiment measures of its trained models as they write: prompts, lengths, batches, rounds."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tokenscale.base.errors import UserError
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.run import RunSettings

KEY = "inference_benchmark"


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen."""

    __pydantic_config__ = STRICT

    temperature: float = option(0.0, "0 takes the likeliest token (greedy); 1 draws as the model says", ge=0)
    top_k: int = option(0, "draw from so many of the likeliest; 0: from all", ge=0, strict=True)
    top_p: float = option(1.0, "draw from the fewest that hold this probability", gt=0, le=1)
    seed: int = option(0, "of the draws; the next prompt has the next seed", ge=0, strict=True)


@dataclass(frozen=True)
class InferenceBenchmarkSettings:
    """Texts behind prompts, and the time of every length, with a cache of keys and values and without, in turns."""

    __pydantic_config__ = STRICT

    prompts: tuple[str, ...] = option(("Once upon a time,",), "what the models go on from; repeated, they are timed")
    sampling: tuple[SamplingSettings, ...] = option((SamplingSettings(),), "each prompt is answered in each way")
    sample_tokens: int = option(50, "tokens of an answer, at most", ge=1, strict=True)
    prompt_tokens: tuple[int, ...] = option((16, 128), "lengths of the prompts that are timed, BOS included")
    new_tokens: tuple[int, ...] = option((32, 128), "tokens that are written behind each of them")
    batches: tuple[int, ...] = option((1,), "prompts that are answered at once")
    rounds: int = option(5, "rounds; everything is timed once in each", ge=1, strict=True)
    bf16: bool = option(False, "weights and cache in bf16; false: as the checkpoint has them")

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """(prompts at once, tokens of a prompt, new tokens), each once.

        >>> InferenceBenchmarkSettings(prompt_tokens=(8,), new_tokens=(4, 4), batches=(1, 2)).cells
        [(1, 8, 4), (2, 8, 4)]
        """
        return list(dict.fromkeys(itertools.product(self.batches, self.prompt_tokens, self.new_tokens)))

    def describe(self, models: int) -> str:
        """What of it `plan` can say.

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
        """(field, what is wrong)."""
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("batches", 1)):
            values = getattr(self, name)
            if not values or min(values) < least:
                yield name, f"has to name one number or more, each at least {least}"
        if not self.prompts or not self.sampling:
            yield "prompts" if not self.prompts else "sampling", "there has to be one"


def check_runs(settings: InferenceBenchmarkSettings, runs: list[RunSettings], file: str) -> None:
    """Raise UserError for runs whose weights cannot be measured so: none kept, masked, or too few positions."""
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
        raise UserError("there is no model to write: the experiment has no runs.", **where, next="add `runs`")
    longest = max(settings.prompt_tokens) + max(settings.new_tokens)
    for run in runs:
        name = run.identity
        if run.objective == "masked":
            raise UserError("a masked model writes no text.", **where, run=name, next="runs of objective causal")
        if not run.checkpoints.final:
            next_ = "runs: {checkpoints: {final: true}}"
            raise UserError("the runs keep no weights to write with.", **where, run=name, next=next_)
        if longest > run.sequence_length:
            raise UserError(
                "prompt and new tokens are more than a row has positions.",
                **where,
                found=f"{max(settings.prompt_tokens)} + {max(settings.new_tokens)} tokens",
                expected=f"at most sequence_length, {run.sequence_length}, of {name}",
                next="shorten prompt_tokens or new_tokens, or lengthen the rows",
            )
