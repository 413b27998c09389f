"""What a tokenizer loses of a corpus: `decode(encode(text))` compared with the text on a sample.

Compared are the characters other than white space, of the text and of what comes back, both after
the tokenizer's own normalisation and without unknown ids. A character is **lost** if it does not
come back, or if the normalisation removes it. It is only **normalised** if the normalisation
replaces it by others (lower case, NFKC, a letter without its accent). Single spaces are not
compared: many tokenizers rejoin words by them. Line breaks, tabs and repeated spaces are counted
apart, by the same bound: a model of code that never saw them writes none. The Unicode form of accents (one character
or two) is not compared. A loss in a few documents that the sample does not hold is not found.
"""

import json
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.tokenizers.backends import random_error
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.huggingface import JsonTokenizer
from tokenscale.settings.data import LOSS_CAUTION

#: places of a corpus that a sample is drawn from, documents at each, and bytes at each; longer
#: documents are shortened
PLACES = 16
DOCUMENTS = 16
PLACE_BYTES = 32 << 10
#: characters of a piece of a long document
PIECE = 1 << 10


def draw_sample(corpus_directory: Path, split: str = "train") -> list[str]:
    """Return up to 256 documents from all over a split, at most 512 KiB of UTF-8 in total. Of long
    documents it has pieces from all over them, in proportion to their lengths. Of a split with
    fewer documents it is `take_sample`.
    """
    # the whole files are checked when they are read in order
    text = RawText(directory=corpus_directory, split=split, verify=False)
    if len(text) <= PLACES * DOCUMENTS:
        return take_sample(
            document for column in text.columns(1) for document in column.to_pylist()
        )
    places = np.linspace(0, len(text), PLACES + 1, dtype=np.int64).tolist()
    # a long document fills a place
    step = DOCUMENTS if text.split["utf8_bytes"] < PLACE_BYTES * len(text) else 1
    found: list[str] = []
    for first, end in zip(places, places[1:], strict=False):
        documents: list[str] = []
        for column in text.columns(step, first, min(first + DOCUMENTS, end)):
            documents += column.to_pylist()
            if sum(map(len, documents)) > DOCUMENTS * PLACE_BYTES:
                break
        found += _shorten(documents)
    return found


def _shorten(documents: Sequence[str]) -> list[str]:
    """Return the documents of a place; if they are too long together, pieces of each."""
    share = PLACE_BYTES / max(1, sum(len(document.encode("utf-8")) for document in documents))
    if share >= 1:
        return [document for document in documents if document]
    shortened = []
    for document in documents:
        count = max(1, round(len(document) * share / PIECE))
        length = int(len(document) * share / count)
        starts = np.linspace(0, len(document) - length, count, dtype=np.int64).tolist()
        # with a space, so that two halves of numbers are not one
        shortened.append(" ".join(document[start : start + length] for start in starts))
    return [document for document in shortened if document]


def take_sample(texts: Iterable[str]) -> list[str]:
    """Return every n-th piece of texts, by the smallest power of two n that leaves less than 512."""
    limit = PLACES * PLACE_BYTES // PIECE
    found: list[str] = []
    stride = 1
    first = 0  # number of the text's first piece among those of all texts
    for text in texts:
        count = -(-len(text) // PIECE)
        piece = -first % stride
        while piece < count:
            found.append(text[piece * PIECE : (piece + 1) * PIECE])
            if len(found) == limit:
                del found[1::2]
                stride *= 2
            piece += stride - (first + piece) % stride
        first += count
    return found


def measure(tokenizer: Tokenizer, sample: Sequence[str], corpus: str) -> dict[str, Any]:
    """Return counts and shares of a sample, for the manifest of a store: `documents`, `utf8_bytes`,
    and of its bytes other than white space `lost` and `normalised`, of its ids `unknown`, and if
    there is any, of its line breaks, tabs and repeated spaces `lost_layout`.

    Raises UserError if the tokenizer loses more than it may (`accepted_loss`: of the bytes other
    than white space, or in line breaks, tabs and repeated spaces of all bytes), encodes the sample
    differently a second time, or makes BOS or EOS from text.
    """
    texts = [part for text in sample for part in text.split(PAIR)]
    documents = tokenizer.encode_batch(texts)
    again = tokenizer.encode(texts)[0]
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *documents])
    if not np.array_equal(ids, again):
        raise random_error(tokenizer.name, corpus=corpus)
    if np.isin(ids, [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]).any():
        what = f"the tokenizer {tokenizer.name} makes control tokens from text."
        next_step = "use a tokenizer whose control tokens are not entries for text"
        raise UserError(
            what,
            corpus=corpus,
            ids=f"BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}",
            next=next_step,
        )
    unknown = tokenizer.unknown_id
    lost: Counter[str] = Counter()
    normalised = 0.0
    layout = kept_layout = 0
    for text, document in zip(texts, documents, strict=True):
        normal = tokenizer.normalize(text)
        back = tokenizer.decode(document if unknown is None else document[document != unknown])
        layout += _count_layout(text)
        kept_layout += min(_count_layout(text), _count_layout(back))
        if back != normal:
            lost += _count_characters(normal) - _count_characters(tokenizer.normalize(back))
        if normal != text:
            removed = _find_removed(tokenizer, text, normal=normal)
            normalised += max(
                0.0,
                _count_bytes(_count_characters(text) - _count_characters(normal))
                - _count_bytes(removed),
            )
            lost += removed
    whole = max(1, sum(_count_bytes(_count_characters(text)) for text in texts))
    found = {
        "documents": len(sample),
        "utf8_bytes": sum(len(text.encode("utf-8")) for text in texts),
        "lost": round(min(1.0, _count_bytes(lost) / whole), 6),
        "normalised": round(normalised / whole, 6),
        "unknown": round(float(np.count_nonzero(ids == unknown)) / max(1, len(ids)), 6)
        if unknown is not None
        else 0.0,
    }
    if kept_layout < layout:
        found["lost_layout"] = round(1 - kept_layout / layout, 6)
    if found["lost"] > tokenizer.accepted_loss:
        raise _loss_error(
            tokenizer,
            found,
            lost=lost,
            corpus=corpus,
        )
    lost_layout = (layout - kept_layout) / max(1, found["utf8_bytes"])
    if lost_layout > tokenizer.accepted_loss:
        raise _layout_error(tokenizer, lost_layout, found=found, corpus=corpus)
    return found


def describe(tokenizer: Tokenizer, found: dict[str, Any]) -> str:
    """Return the result of `measure` as a line for a log."""
    layout = found.get("lost_layout", 0.0)
    caution = "caution: " if max(found["lost"], layout) > LOSS_CAUTION else ""
    of_layout = f", {layout:.2%} of their line breaks, tabs and repeated spaces" if layout else ""
    return (
        f"{caution}tokenizer {tokenizer.name} loses {found['lost']:.2%} of the bytes of "
        f"{found['documents']:,} sampled "
        f"documents ({found['normalised']:.2%} are normalised){of_layout}; {found['unknown']:.2%} "
        "of their ids are unknown"
    )


def _count_characters(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> Counter[str]:
    """Count the characters other than white space, and `▁`, which stands for it. Letters have their
    accents (NFC).
    """
    return Counter("".join(unicodedata.normalize(form, text).replace("▁", " ").split()))


def _count_layout(text: str) -> int:
    """Count the characters of white space that are not one space between two words."""
    return sum(len(run) for run in re.findall(r"\s+", text) if run != " ")


def _find_removed(tokenizer: Tokenizer, text: str, normal: str) -> Counter[str]:
    """Return what the normalisation removes of a text: characters that it removes anywhere, and of
    the others, if there are fewer afterwards, an equal share of each.
    """
    before = _count_characters(text, form="NFKC")
    after = _count_characters(normal, form="NFKC")
    frame = tokenizer.normalize("aa")
    gone = before - after
    removed = Counter({c: n for c, n in gone.items() if tokenizer.normalize(f"a{c}a") == frame})
    others = gone - removed
    if (missing := others.total() - (after - before).total()) > 0:
        removed += Counter({c: n * missing / others.total() for c, n in others.items()})
    return removed


def _count_bytes(characters: Counter[str]) -> float:
    return sum(n * len(c.encode("utf-8")) for c, n in characters.items())


def _loss_error(
    tokenizer: Tokenizer, found: dict[str, Any], lost: Counter[str], corpus: str
) -> UserError:
    most = sorted(lost.items(), key=lambda item: (-item[1], item[0]))[:5]
    return UserError(
        f"the tokenizer {tokenizer.name} loses {found['lost']:.1%} of this text.",
        corpus=corpus,
        found=(
            f"{', '.join(f'{c!r} {n:,.0f} times' for c, n in most)} in {found['documents']:,} "
            "sampled documents"
        ),
        expected=(
            f"at most {tokenizer.accepted_loss:.1%} of the bytes  (accepted_loss of the tokenizer)"
        ),
        next="use a tokenizer with these characters (with byte fallback it loses nothing), or "
        + _describe_acceptance(tokenizer, share=found["lost"]),
    )


def _layout_error(
    tokenizer: Tokenizer, lost_layout: float, found: dict[str, Any], corpus: str
) -> UserError:
    return UserError(
        f"the tokenizer {tokenizer.name} loses the layout of this text: line breaks, tabs and "
        "repeated spaces.",
        corpus=corpus,
        found=(
            f"{found['lost_layout']:.1%} of them, {lost_layout:.1%} of the bytes, in "
            f"{found['documents']:,} sampled documents"
        ),
        expected=(
            f"at most {tokenizer.accepted_loss:.1%} of the bytes  (accepted_loss of the tokenizer)"
        ),
        next="use a tokenizer that keeps them (one of bytes does), or "
        + _describe_acceptance(tokenizer, share=lost_layout),
    )


def _describe_acceptance(tokenizer: Tokenizer, share: float) -> str:
    """Return how to accept that this share of a text is lost."""
    accepted = math.ceil(10 * share) / 10
    next_step = "accept the loss:\n"
    next_step += f"tokenizers.{tokenizer.name}.accepted_loss: {accepted} in the configuration"
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.kind == "huggingface":
        name = f"{tokenizer.name}-lossy"
        settings = {"name": name, "kind": "huggingface", "source": str(tokenizer.path.parent)}
        names = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        settings |= {role: tokenizer.token_name(i) for role, i in names.items() if i is not None}
        text = shlex.quote(json.dumps(settings | {"accepted_loss": accepted}))
        next_step += f"; without one, use the tokenizer {name} after\n"
        next_step += (
            f"tokenscale tokenizer --settings {text} --output "
            f"results/tokenizers/{name}/manifest.json"
        )
    return next_step
