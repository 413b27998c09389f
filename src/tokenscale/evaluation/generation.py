"""Text from a causal model: one token after another, greedy or drawn."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenscale.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the likeliest (greedy); `top_k` 0 and `top_p` 1 leave all."""

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
    """Logits [V] → what the next token is drawn from, fp64 [V], sums to 1.

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


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: list[int],
    *,
    max_new_tokens: int,
    positions: int,
    vocabulary_size: int,
    stop_id: int | None,
    sampling: Sampling,
    device: torch.device,
    cached: bool = True,
    say: Callable[[int], None] | None = None,
) -> list[int]:
    """The tokens behind a prompt of at least one: at most `max_new_tokens`, and none behind `positions` in all. The
    last one is `stop_id` where that was generated. `say` hears of each as soon as it is known.

    Ids from `vocabulary_size` on, which are no text (a mask, rows that fill a matrix), are never chosen. With `cached`,
    a model that offers a cache of keys and values reads each token once. Equal seeds draw equal tokens; draws are made
    on the CPU in fp64, whatever the device.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    count = min(max_new_tokens, positions - len(prompt))
    cache = None
    if cached and hasattr(model, "cache") and count > 0:
        weight = model.head.weight
        cache = model.cache(1, len(prompt) + count, weight.dtype, device)
    tokens, read = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        inputs = torch.tensor([tokens[read:]], device=device)
        hidden = model.hidden(inputs) if cache is None else model.hidden(inputs, cache=cache)
        read = 0 if cache is None else len(tokens)
        logits = model.head(hidden[0, -1])[:vocabulary_size].float().cpu()
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(probabilities(logits, sampling), 1, generator=generator))
        tokens.append(token)
        if say is not None:
            say(token)
        if token == stop_id:
            break
    return tokens[len(prompt) :]
