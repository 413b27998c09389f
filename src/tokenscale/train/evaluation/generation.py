"""Text generation by a causal model: one token after another, greedy or sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.train.models.language_model import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the likeliest (greedy); `top_k` 0 and `top_p` 1 keep all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, right, words in (
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1 (all)"),
        ):
            if not right:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{flag} is out of range.", found=getattr(self, name), expected=words, next=f"mend {flag}"
                )


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that the next token is drawn from: logits [V] → fp64 [V], sums to 1.

    Softmax at the temperature; then the `top_k` likeliest tokens (Fan et al. 2018); then the fewest likeliest of these
    that hold at least `top_p` of what is left (nucleus, Holtzman et al. 2020), at least one.
    """
    found = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    ordered, tokens = found.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = 0
    before = (ordered / ordered.sum()).cumsum(dim=-1) - ordered / ordered.sum()
    if sampling.top_p < 1:
        ordered[1:][before[1:] >= sampling.top_p] = 0
    return torch.zeros_like(found).scatter_(0, tokens, ordered / ordered.sum())


def generate(
    model: LanguageModel, prompt: Sequence[int], *, on_token: Callable[[int], None] | None = None, **options: Any
) -> list[int]:
    """Return the new tokens of one prompt. `options` are those of `generate_rows`; `on_token` receives each token."""
    on_tokens = None if on_token is None else lambda tokens: on_token(tokens[0])
    return generate_rows(model, [prompt], on_token=on_tokens, **options)[0]


@torch.no_grad()  # tensors of inference mode could not be used in a training that goes on
def generate_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    positions: int,
    vocabulary_size: int,
    stop_id: int | None,
    sampling: Sampling,
    device: torch.device,
    cached: bool = True,
    on_token: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each of B prompts [B, T] of one length, at least one token.

    At most `max_new_tokens` are generated, and none beyond `positions` in all. The last one is `stop_id` where that
    was generated. `on_token` receives the B tokens of a position as soon as they are known; a row that has ended
    continues with `stop_id`.

    Ids from `vocabulary_size` on, which are no text (a mask, rows that fill a matrix), are never chosen. With `cached`,
    a model that offers a cache of keys and values reads each token once. Row n draws with seed + n, on the CPU in fp64,
    so that equal seeds draw equal tokens on equal logits, whatever the device. Where the model's forward passes are
    collectives, every rank must call this function, or `wait_for_others`.
    """
    rows, length = [list(prompt) for prompt in prompts], len(prompts[0])
    if any(len(row) != length for row in rows):
        raise ValueError("the prompts of a batch are equally long")
    generators = [torch.Generator().manual_seed(sampling.seed + n) for n in range(len(rows))]
    count = max(0, min(max_new_tokens, positions - length))
    cache = model.new_cache(len(rows), length + count, device) if cached and count else None
    ended, read = [False] * len(rows), 0
    for end in range(length, length + count):
        model.any_unfinished(True)
        inputs = torch.tensor([row[read:] for row in rows], device=device)
        logits = model.next_logits(inputs, cache)[:, :vocabulary_size].float().cpu()
        read = 0 if cache is None else end
        for n, row in enumerate(rows):
            row.append(stop_id if ended[n] else _chosen(logits[n], sampling, generators[n]))
            ended[n] = row[-1] == stop_id
        if on_token is not None:
            on_token([row[-1] for row in rows])
        if all(ended):
            break
    wait_for_others(model, device)
    return [_until(row[length:], stop_id) for row in rows]


@torch.no_grad()
def wait_for_others(model: LanguageModel, device: torch.device) -> None:
    """Run forward passes of one token until no other rank needs this rank's."""
    while model.any_unfinished(False):
        model.next_logits(torch.zeros((1, 1), dtype=torch.int64, device=device))


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, sampling), 1, generator=generator))


def _until(tokens: list[int], stop_id: int | None) -> list[int]:
    return tokens[: tokens.index(stop_id) + 1] if stop_id in tokens else tokens
