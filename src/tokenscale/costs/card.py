"""Card of a text: how many documents it holds, how long they are, and what each approach cuts and
pads of them. `advise`, `plan` and the report show the same lines.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenscale.base.wording import listing
from tokenscale.costs import data as costs
from tokenscale.data.order.packing import best_fit_decreasing, split_documents

#: documents of a batch of length-bucketed
BATCH = 64
#: approach → the need for which it is taken among approaches that are as fast
NEEDS = {
    "packed": "rows are read in random order from a slow disk",
    "token-list": "the length of a row may change",
    "padding-free": "tokens cannot be stored",
}
#: characters of a sample, so that little of a private text is shown
SAMPLE_CHARACTERS = 40
#: documents whose rows are counted; of more, ones at even distances
MOST_DOCUMENTS = 100_000


@dataclass(frozen=True)
class TextCard:
    """Facts of a training text. `lengths` are tokens of whole documents with BOS, of all or of a
    sample; None before a tokenizer has counted them. Where only their sum and quantiles are kept,
    these are `tokens` and `quantiles` (median, 95 %, largest).
    """

    documents: float
    text_bytes: float
    dropped: Mapping[str, int] = field(default_factory=dict)  # duplicates, empty, … → documents
    lengths: np.ndarray | None = None
    samples: Sequence[str] = ()
    tokens: float | None = None
    quantiles: tuple[float, float, float] | None = None

    def describe(self) -> Iterator[str]:
        """Yield the lines that hold for every length of rows."""
        if dropped := [f"{count:,} {what}" for what, count in self.dropped.items() if count]:
            yield f"dropped: {listing(dropped)}"
        tokens = self.tokens
        quantiles = self.quantiles
        if self.lengths is not None and len(self.lengths):
            tokens = float(np.mean(self.lengths)) * self.documents
            quantiles = costs.measure_quantiles(self.lengths)
        found = []
        if quantiles is not None:
            median, most, largest = quantiles
            found.append(
                f"one document of {largest:,.0f} tokens"
                if self.documents == 1
                else f"a document: {median:,.0f} tokens in the median, 95 % at most {most:,.0f}, "
                f"the largest {largest:,.0f}"
            )
        if tokens is not None:
            found.append(f"{tokens / max(1, self.text_bytes):.3f} tokens a byte")
        if found:
            yield "; ".join(found)
        if self.samples:
            yield "begin: " + " | ".join(map(shorten, self.samples))

    def compare(self, sequence_length: int) -> dict[str, dict[str, float]]:
        """Return approach → the shares of its positions that count (`useful`), that are padding
        (`padding`), and of tokens that it cuts (`cut`). An online approach is as its offline
        counterpart.
        """
        assert self.lengths is not None  # there are tokens to compare
        step = -(-len(self.lengths) // MOST_DOCUMENTS)
        return compare_approaches(np.asarray(self.lengths[::step], np.int64), t=sequence_length)

    def describe_rows(self, sequence_length: int) -> str:
        """Return what the approaches cut and pad at this length of rows, as a line."""
        words = []
        for approach, of in self.compare(sequence_length).items():
            lost = [f"cuts {of['cut']:.1%}"] if of["cut"] else []
            lost += [f"pads {of['padding']:.1%}"] if of["padding"] >= 0.0005 else []
            words.append(f"{approach} {' and '.join(lost) or 'keeps all'}")
        return f"rows of {sequence_length:,}: {'; '.join(words)}"


def count_dropped(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return what the cleaning of a corpus dropped, by its manifest: words → documents."""
    counts = manifest.get("cleaning", {}).get("documents", {})
    return {
        "duplicates": counts.get("duplicates", 0),
        "empty or short": counts.get("too_short", 0) + counts.get("no_text", 0),
        "too long": counts.get("too_long", 0),
    }


def choose_samples(documents: int) -> list[int]:
    """Return the numbers of three documents from all over a text, fewer of a shorter text.

    >>> choose_samples(60), choose_samples(1)
    ([10, 30, 50], [0])
    """
    return sorted({documents * k // 6 for k in (1, 3, 5)})


def shorten(text: str) -> str:
    """Return the beginning of a text in one line.

    >>> shorten("a\\n b"), len(shorten("word " * 50))
    ('a b', 41)
    """
    line = " ".join(text[: 4 * SAMPLE_CHARACTERS].split())
    return line if len(line) <= SAMPLE_CHARACTERS else f"{line[:SAMPLE_CHARACTERS]}…"


def count_packed(lengths: np.ndarray, sequence_length: int) -> tuple[int, int]:
    """Return (pieces of documents, rows) of packed rows."""
    pieces = split_documents(lengths, sequence_length=sequence_length)[2]
    return len(pieces), len(best_fit_decreasing(pieces, capacity=sequence_length + 1)[1]) - 1


def compare_approaches(lengths: np.ndarray, t: int) -> dict[str, dict[str, float]]:
    """Return the shares of each approach, see `TextCard.compare`; `lengths` int64 [documents]."""
    cut = costs.cut_share(lengths, sequence_length=t)
    padding = costs.padding_share(lengths, sequence_length=t)
    bucketed = costs.bucketed_share(lengths, t, batch=BATCH, multiple=costs.BUCKET_MULTIPLE)
    pieces, rows = count_packed(lengths, sequence_length=t)
    packed = costs.fill_share(lengths, sequence_length=t, rows=rows)
    # the first token of each further piece of a row is no label, and no padding
    begun = (pieces - rows) / (rows * t)
    streamed = float((lengths - 1).sum() / lengths.sum())
    return {
        "packed": {"useful": packed, "padding": max(0.0, 1 - packed - begun), "cut": 0.0},
        "token-list": {"useful": streamed, "padding": 0.0, "cut": 0.0},
        "length-bucketed": {"useful": bucketed, "padding": 1 - bucketed, "cut": cut},
        "pretokenized-padded": {"useful": 1 - padding, "padding": padding, "cut": cut},
    }
