"""Text generation by a causal model, greedy or sampled: prompts, and translations in any parallel
layout.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.train.models.decoder import Attention
from tokenscale.train.models.objective import KVCache, LanguageModel
from tokenscale.train.parallel.sharding import ParallelModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the likeliest (greedy); `top_k` 0 and
    `top_p` 1 keep all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that the next token is drawn from: logits [V] → fp64 [V], sums to 1.

    Softmax at the temperature; then the `top_k` likeliest tokens (Fan et al. 2018); then the fewest
    likeliest of these that hold at least `top_p` of what is left (nucleus, Holtzman et al. 2020),
    at least one.
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
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> list[int]:
    """Return the new tokens of one prompt. `options` are those of `generate_rows`; `on_token`
    receives each token.
    """
    on_tokens = None if on_token is None else lambda tokens: on_token(tokens[0])
    return generate_rows(
        model,
        prompts=[prompt],
        on_token=on_tokens,
        **options,
    )[0]


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

    At most `max_new_tokens` are generated, and none beyond `positions` in all. The last one is
    `stop_id` where that was generated. `on_token` receives the B tokens of a position as soon as
    they are known; a row that has ended continues with `stop_id`.

    Ids from `vocabulary_size` on, which are no text (a mask, rows that fill a matrix), are never
    chosen. With `cached`, a model that offers a cache of keys and values reads each token once. Row
    n draws with seed + n, on the CPU in fp64, so that equal seeds draw equal tokens on equal
    logits, whatever the device. Where the model's forward passes are collectives, every rank must
    call this function, or `wait_for_others`.
    """
    rows = [list(prompt) for prompt in prompts]
    length = len(prompts[0])
    if any(len(row) != length for row in rows):
        raise ValueError("the prompts of a batch are equally long")
    generators = [torch.Generator().manual_seed(sampling.seed + n) for n in range(len(rows))]
    count = max(0, min(max_new_tokens, positions - length))
    cache = (
        model.new_cache(len(rows), length=length + count, device=device)
        if cached and count
        else None
    )
    ended = [False] * len(rows)
    read = 0
    for end in range(length, length + count):
        model.any_unfinished(True)
        inputs = torch.tensor([row[read:] for row in rows], device=device)
        logits = model.next_logits(inputs, cache)[:, :vocabulary_size].float().cpu()
        read = 0 if cache is None else end
        for n, row in enumerate(rows):
            row.append(
                row[-1] if ended[n] else _chosen(logits[n], sampling, generator=generators[n])
            )
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


GREEDY = Sampling(temperature=0.0)
#: sentences that are translated together; their caches of keys and values exist at once
ROWS = 16


@dataclass(frozen=True)
class Pair:
    """A held-out document: its number in the split, its text and its translation."""

    number: int
    source: str
    reference: str


@dataclass(frozen=True)
class Translation:
    """The model's translation of a pair's source, and the seconds it took: an equal share of its
    batch's.
    """

    pair: Pair
    hypothesis: str
    duration_s: float


def held_out_pairs(corpus: Path, count: int, split: str = "validation") -> list[Pair]:
    """Return the first pairs of a split of a built corpus, at most `count`. Raises UserError where
    its documents are no pairs.
    """
    text = RawText(directory=corpus, split=split, verify=False)
    if not text.pairs or not len(text):
        raise UserError(
            "there is nothing to translate: the corpus holds no pairs."
            if not text.pairs
            else "there is nothing to translate: the split is empty.",
            corpus=corpus,
            split=split,
            next=(
                "name a corpus of texts with translations (`target_column` or `target_files` of "
                "its source)"
            ),
        )
    documents = (document for batch in text.batches(count) for document in batch)
    return [
        Pair(number, *document.split(PAIR))
        for number, document in enumerate(islice(documents, count))
    ]


@torch.no_grad()
def translate(
    model: LanguageModel,
    pairs: Sequence[Pair],
    prompts: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    positions: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Translation]:
    """Yield greedy translations of this rank's share: a pair's prompt, BOS + source + EOS, then the
    likeliest token until EOS.

    At most twice as many tokens as the source has, and 16, so that a model that never ends a
    sentence ends, too; none behind `positions`. A source that leaves no room has an empty
    translation. Dropout is off meanwhile; attention is torch's own, without a document mask, since
    a row is one document.

    Sources of equal length make batches of at most ROWS, of all pairs and before ranks share them
    out: what is computed together is the same in every layout. Where the model's forward passes are
    collectives, every rank must take all of its translations.
    """
    batches = _batches(pairs, prompts)
    with _plain(model):
        for first in range(0, len(batches), world_size):
            if first + rank >= len(batches):
                wait_for_others(model, device)
                continue
            batch, rows_of_ids = batches[first + rank]
            began = time.monotonic()
            rows = generate_rows(
                model,
                prompts=rows_of_ids,
                max_new_tokens=2 * (len(rows_of_ids[0]) - 2) + 16,
                positions=positions,
                vocabulary_size=tokenizer.vocabulary_size,
                stop_id=tokenizer.eos_id,
                sampling=GREEDY,
                device=device,
            )
            texts = [
                tokenizer.decode([token for token in row if token != tokenizer.eos_id]).strip()
                for row in rows
            ]
            duration_s = (time.monotonic() - began) / len(batch)
            yield from (
                Translation(pair=pair, hypothesis=text, duration_s=duration_s)
                for pair, text in zip(batch, texts, strict=True)
            )


def _batches(
    pairs: Sequence[Pair], prompts: Sequence[np.ndarray]
) -> list[tuple[list[Pair], list[list[int]]]]:
    """Return (pairs, prompts of one length) of each batch."""
    by_length: dict[int, list[tuple[Pair, list[int]]]] = {}
    for pair, prompt in zip(pairs, prompts, strict=True):
        by_length.setdefault(len(prompt), []).append((pair, prompt.tolist()))
    found = []
    for _, rows in sorted(by_length.items()):
        for begin in range(0, len(rows), ROWS):
            batch, of_batch = zip(*rows[begin : begin + ROWS], strict=True)
            found.append((list(batch), list(of_batch)))
    return found


@contextmanager
def _plain(model: LanguageModel) -> Iterator[None]:
    """A context in which the model can read one token at a time: no dropout, no compiled blocks, no
    document boundaries.
    """
    training = model.training
    kernels = {module: module.kernel for module in model.modules() if isinstance(module, Attention)}
    with ExitStack() as stack:
        # else this costs seconds
        if any(module._compiled_call_impl is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.train, training)
        model.eval()
        for module, kernel in kernels.items():
            stack.callback(setattr, module, "kernel", kernel)
            module.kernel = "sdpa"
        yield


class TextModel(LanguageModel):
    """A model whose weights stay where the layout has put them, so that one which fits no device
    generates text, too.

    Ranks of a pipeline or a tensor group read the same rows, and each gets the logits of the whole
    model, so that all choose the same tokens. Ranks that read different rows generate different
    texts. Every forward pass is a collective of the ranks of a replica: all of them must run
    equally many (`any_unfinished`).
    """

    def __init__(self, parallel: ParallelModel, device: torch.device):
        super().__init__()
        self.model = parallel.objective.model
        self.settings = self.model.settings
        self._parallel = parallel
        self._device = device

    def new_cache(self, rows: int, length: int, device: torch.device) -> KVCache | None:
        return self.model.new_cache(rows, length, device)

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row, the same on every rank of a
        replica's group.
        """
        parallel = self._parallel
        with parallel.whole_positions():
            if parallel.pipeline is not None:
                return parallel.pipeline.next_logits(tokens_bt, cache)
            return parallel.objective.next_logits(tokens_bt, cache)

    def any_unfinished(self, unfinished: bool) -> bool:
        """Return whether any rank that shares this rank's forward passes is unfinished. A
        collective of these ranks.
        """
        group = self._parallel.lockstep
        if group is None:
            return unfinished
        flag = torch.tensor(int(unfinished), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
