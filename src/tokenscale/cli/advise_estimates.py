"""From a sample to all of the text, with intervals: padding, cut text, bytes, stalls, and the format to choose."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenscale.cli.advise_sample import AdviceSettings, Measured
from tokenscale.cli.advise_text import Estimate, as_times, percent
from tokenscale.costs import data as costs
from tokenscale.data.order.packing import best_fit_decreasing, cut

RESAMPLES = 200
#: of the packing, which is done anew for each
PACKINGS = 50
SEED = 0
#: of fewer long documents in the sample, resamples say too little: how many there could be is bounded by their count
FEW = 30
#: below this gain in useful tokens, and with fewer tokens cut, rows of one document are as good as packed ones
LEAST_GAIN, LEAST_CUT = 0.02, 0.001


class Estimator:
    """Estimates from the documents of a sample and resamples of them."""

    def __init__(self, measured: Measured):
        found = measured.sample
        self.measured, self.lengths = measured, measured.lengths
        self.weights = costs.resampled(found.units, found.unit_count, RESAMPLES, SEED)
        # finite population: what was seen is certain
        seen = len(found.texts) / found.documents if found.counted and found.unit_count == len(found.texts) else 0.0
        self.unseen = math.sqrt(max(0.0, 1 - seen))
        self.documents = found.documents
        count = len(measured.batch_s)
        batches = costs.resampled(np.arange(count), count, RESAMPLES, SEED + 1)
        #: tokens a second and core, and the same of each resample
        self.speed = float(costs.ratio(measured.batch_tokens, measured.batch_s))
        self.speeds = costs.ratio(measured.batch_tokens, measured.batch_s, batches)

    def of(self, function: Callable[[np.ndarray | None], Any]) -> Estimate:
        """Of a function of weights."""
        return self.spread(float(function(None)), function(self.weights))

    def total(self, per_document: np.ndarray) -> Estimate:
        """Of a sum over all documents of the data set."""
        mean = float(costs.mean(per_document))
        if self.measured.sample.counted:
            return self.spread(mean * self.documents, costs.mean(per_document, self.weights) * self.documents)
        scale = self.documents / len(per_document)  # how many documents there are is estimated, too
        return self.spread(mean * self.documents, self.weights @ np.asarray(per_document, dtype=float) * scale)

    def spread(self, value: float, values: np.ndarray, certain: bool = True) -> Estimate:
        """Value and interval; `certain`: known exactly where every document was seen."""
        low, high = costs.interval(values)
        if certain:
            low, high = (value + (bound - value) * self.unseen for bound in (low, high))
        return Estimate(value, min(low, value), max(high, value))

    def of_speed(self, function: Callable[[Any], Any]) -> Estimate:
        """Of a function of the tokenizer's tokens a second and core."""
        return self.spread(float(function(self.speed)), function(self.speeds), certain=False)

    def fill(self, sequence_length: int) -> Estimate:
        """Share of useful positions in packed rows.

        The more documents, the better they fit: what is left open falls about as one over their number. So what a half
        of the sample loses against the whole is what all documents gain (and a third of what a quarter loses); the
        upper end counts it three times more, up to rows without a free place.
        """
        lengths = self.lengths
        value = filled(lengths, sequence_length)
        if self.unseen == 0:
            return Estimate(value, value, value)
        lost = [value - np.mean([filled(lengths[i::k], sequence_length) for i in range(k)]) for k in (2, 4)]
        more = max(0.0, lost[0], lost[1] / 3) * max(0.0, 1 - len(lengths) / self.documents)
        drawn = (np.repeat(lengths, weights.astype(int)) for weights in self.weights[:PACKINGS])
        low, high = costs.interval([filled(some, sequence_length) for some in drawn])
        most = self.of(lambda w: costs.fill_at_most(lengths, sequence_length, w))
        row = sequence_length / (self.documents * max(1.0, float(np.mean(lengths - 1))))  # of all, one more or less
        value = min(most.value, value + more)
        return Estimate(value, min(value, low) - row, min(most.high, max(value, high) + 3 * more))


def filled(lengths: np.ndarray, sequence_length: int) -> float:
    """Share of useful positions where these documents are packed."""
    rows = len(best_fit_decreasing(cut(lengths, sequence_length)[2], sequence_length + 1)[1]) - 1
    return costs.fill(lengths, sequence_length, rows)


def of_length(estimator: Estimator, t: int) -> dict[str, Any]:
    lengths = estimator.lengths
    fill = estimator.fill(t)
    padding = estimator.of(lambda w: costs.padding_share(lengths, t, w))
    cut_tokens = estimator.of(lambda w: costs.cut_share(lengths, t, w))
    cut_documents = estimator.of(lambda w: costs.cut_documents_share(lengths, t, w))
    seen = int(np.count_nonzero(lengths - 1 > t))
    if seen == 0:  # resamples of a sample without long documents hold none
        share, tokens = costs.unseen_cut(lengths)
        cut_tokens = Estimate(0.0, 0.0, tokens * estimator.unseen)
        cut_documents = Estimate(0.0, 0.0, share * estimator.unseen)
    elif seen < FEW:
        cut_tokens, cut_documents = (
            Estimate(
                e.value, e.low, max(e.high, e.value * (1 + (costs.count_at_most(seen) / seen - 1) * estimator.unseen))
            )
            for e in (cut_tokens, cut_documents)
        )
    gain = estimator.of(lambda w: fill.value / (1 - costs.padding_share(lengths, t, w)))
    return {
        "padding": padding,
        "cut": cut_tokens,
        "cut_documents": cut_documents,
        "fill_packed": fill,
        "gain": Estimate(gain.value, gain.low * fill.low / fill.value, gain.high * fill.high / fill.value),
    }


def of_formats(estimator: Estimator, t: int, fill: Estimate) -> dict[str, Any]:
    lengths, measured = estimator.lengths, estimator.measured
    tokens = float(lengths.sum())
    useful, kept = lengths - 1, np.minimum(lengths - 1, t)
    packed = estimator.total(useful)
    ends = (packed.low / fill.high, packed.high / fill.low)
    positions = {
        "padded": estimator.total(np.full(len(lengths), t)),
        "token-list": estimator.total(lengths),
        "packed": Estimate(packed.value / fill.value, *ends),
    }
    found = {}
    for name, stored in measured.stored.items():
        size, write_s, read_s = estimator.total(stored.bytes_each), stored.write_s, stored.read_s
        size = Estimate(*(n + stored.bytes_once for n in (size.value, size.low, size.high)))
        found[name] = {
            "tokens": positions.get(name, positions["token-list"]),
            "useful_tokens": estimator.total(kept if name == "padded" else useful),
            "bytes": size,
            "core_s_to_tokenize_and_write": estimator.spread(
                estimator.documents * (tokens / estimator.speed + write_s) / len(lengths),
                estimator.documents * (tokens / estimator.speeds + write_s) / len(lengths),
                certain=False,
            ),
        }
        if read_s is not None:
            found[name]["core_s_to_read"] = estimator.documents * read_s / len(lengths)
            found[name]["break_even_epochs"] = estimator.of_speed(
                lambda s, w=write_s, r=read_s: costs.break_even_epochs(tokens / s + w, tokens / s, r)
            )
    return found


def of_tokenizing(estimator: Estimator, rate: float | None) -> dict[str, Any]:
    measured = estimator.measured
    text_bytes_per_token = measured.text_bytes.sum() / max(1, (measured.lengths - 1).sum())
    found: dict[str, Any] = {
        "tokens_per_core_s": estimator.of_speed(lambda s: s),
        "text_bytes_per_core_s": estimator.of_speed(lambda s: s * text_bytes_per_token),
        "rate_at_stall_0.01": estimator.of_speed(lambda s: costs.rate_at_stall(0.01, s)),
        "rate_at_stall_0.1": estimator.of_speed(lambda s: costs.rate_at_stall(0.1, s)),
    }
    if rate:
        found["core_share"] = estimator.of_speed(lambda s: costs.core_share(rate, s))
        found["step_share"] = estimator.of_speed(lambda s: costs.stall_share(rate, s))
    return found


def of_approaches(estimator: Estimator, settings: AdviceSettings, fill: float) -> dict[str, Any]:
    """Times of each approach on one rank that does its data work in the training thread."""
    t, rate, lengths = settings.sequence_length, settings.tokens_per_second, estimator.lengths
    n, documents = len(lengths), estimator.documents
    stored = estimator.measured.stored
    rows = {  # (positions of each document, format that is read, useful tokens of each document)
        "padded": (np.full(n, t), None, np.minimum(lengths - 1, t)),
        "padding-free": (lengths, None, lengths - 1),
        "pretokenized-padded": (np.full(n, t), "padded", np.minimum(lengths - 1, t)),
        "token-list": (lengths, "token-list", lengths - 1),
        "packed": ((lengths - 1) / fill, "packed", lengths - 1),
    }
    found = {}
    for approach, (positions, form, useful) in rows.items():

        def times(weights, speed, positions=positions, form=form):
            count, tokens = costs.mean(positions, weights) * documents, costs.mean(lengths, weights) * documents
            if form is None:
                data_s, once_s = tokens / speed, 0.0 * tokens
            else:
                data_s, once_s = (
                    documents * stored[form].read_s / n,
                    tokens / speed + documents * stored[form].write_s / n,
                )
            epoch = costs.epoch_s(count, rate, data_s)
            return data_s / epoch, epoch, once_s + settings.epochs * epoch

        values, resamples = times(None, estimator.speed), times(estimator.weights, estimator.speeds)
        stall, epoch, all_s = (
            estimator.spread(float(v), r, certain=False) for v, r in zip(values, resamples, strict=True)
        )
        found[approach] = {
            "stall": stall,
            "epoch_s": epoch,
            "total_s": all_s,
            "useful_tokens_per_s": estimator.spread(
                float(costs.mean(useful)) * documents / values[1],
                costs.mean(useful, estimator.weights) * documents / resamples[1],
                certain=False,
            ),
        }
    return found


def choice(at: dict[str, Estimate]) -> tuple[str, str]:
    """The format, and why, in a sentence."""
    if at["gain"].value - 1 < LEAST_GAIN and at["cut"].value < LEAST_CUT:
        return "padded", (
            f"documents fill their rows: padding takes {percent(at['padding'])} of the positions and "
            f"{percent(at['cut'])} of the tokens are cut, so packing would gain less than {LEAST_GAIN:.0%}"
        )
    cuts = f", where padded rows also drop {percent(at['cut'])} of them" if at["cut"].value >= LEAST_CUT else ""
    return "packed", (
        f"{as_times(at['gain'])} as many useful tokens from the same step as padded rows{cuts}; nothing is dropped"
    )
