"""Greedy translation by a causal model that was trained on pairs, from the source and the EOS after it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.train.evaluation.generation import Sampling, generate_rows, wait_for_others
from tokenscale.train.models.decoder import Attention
from tokenscale.train.models.language_model import LanguageModel

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
    """The model's translation of a pair's source, and the seconds it took: an equal share of its batch's."""

    pair: Pair
    hypothesis: str
    duration_s: float


def held_out_pairs(corpus: Path, count: int, split: str = "validation") -> list[Pair]:
    """Return the first pairs of a split of a built corpus, at most `count`. Raises UserError where its documents are no
    pairs.
    """
    text = RawText(corpus, split, verify=False)
    if not text.pairs or not len(text):
        raise UserError(
            "there is nothing to translate: the corpus holds no pairs."
            if not text.pairs
            else "there is nothing to translate: the split is empty.",
            corpus=corpus,
            split=split,
            next="name a corpus of texts with translations (`target_column` or `target_files` of its source)",
        )
    documents = (document for batch in text.batches(count) for document in batch)
    return [Pair(number, *document.split(PAIR)) for number, document in enumerate(islice(documents, count))]


@torch.no_grad()
def translate(
    model: LanguageModel,
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    positions: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Translation]:
    """Yield greedy translations of this rank's share: BOS + source + EOS, then the likeliest token until EOS.

    At most twice as many tokens as the source has, and 16, so that a model that never ends a sentence ends, too; none
    behind `positions`. A source that leaves no room has an empty translation. Dropout is off meanwhile; attention is
    torch's own, without a document mask, since a row is one document.

    Sources of equal length make batches of at most ROWS, of all pairs and before ranks share them out: what is computed
    together is the same in every layout. Where the model's forward passes are collectives, every rank must take all of
    its translations.
    """
    batches = _batches(pairs, tokenizer)
    with _plain(model):
        for first in range(0, len(batches), world_size):
            if first + rank >= len(batches):
                wait_for_others(model, device)
                continue
            batch, prompts = batches[first + rank]
            began = time.monotonic()
            rows = generate_rows(
                model,
                prompts,
                max_new_tokens=2 * (len(prompts[0]) - 2) + 16,
                positions=positions,
                vocabulary_size=tokenizer.vocabulary_size,
                stop_id=tokenizer.eos_id,
                sampling=GREEDY,
                device=device,
            )
            texts = [tokenizer.decode([token for token in row if token != tokenizer.eos_id]).strip() for row in rows]
            duration_s = (time.monotonic() - began) / len(batch)
            yield from (Translation(pair, text, duration_s) for pair, text in zip(batch, texts, strict=True))


def _batches(pairs: Sequence[Pair], tokenizer: Tokenizer) -> list[tuple[list[Pair], list[list[int]]]]:
    """Return (pairs, prompts of one length) of each batch."""
    sources = tokenizer.encode_batch([pair.source for pair in pairs])
    by_length: dict[int, list[tuple[Pair, list[int]]]] = {}
    for pair, source in zip(pairs, sources, strict=True):
        by_length.setdefault(len(source), []).append((pair, [tokenizer.bos_id, *source.tolist(), tokenizer.eos_id]))
    found = []
    for _, rows in sorted(by_length.items()):
        for begin in range(0, len(rows), ROWS):
            batch, prompts = zip(*rows[begin : begin + ROWS], strict=True)
            found.append((list(batch), list(prompts)))
    return found


@contextmanager
def _plain(model: LanguageModel) -> Iterator[None]:
    """A context in which the model can read one token at a time: no dropout, no compiled blocks, no document
    boundaries.
    """
    training = model.training
    kernels = {module: module.kernel for module in model.modules() if isinstance(module, Attention)}
    with ExitStack() as stack:
        if any(module._compiled_call_impl is not None for module in model.modules()):  # else this costs seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.train, training)
        model.eval()
        for module, kernel in kernels.items():
            stack.callback(setattr, module, "kernel", kernel)
            module.kernel = "sdpa"
        yield
