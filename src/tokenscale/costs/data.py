"""Cost of data loading: padding, cut text and tokenizing.

Lengths are tokens of whole documents including BOS: a document of n tokens has n − 1 useful labels. A row of sequence
length T has T + 1 tokens and trains on T positions. With `weights`, document i counts weights[..., i] times and the
result has their leading shape: a bootstrap resample is a row of weights.
"""

from collections.abc import Sequence

import numpy as np

Rate = np.ndarray | float


def padding_share(lengths: np.ndarray, sequence_length: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the share of padding with one document per row: 1 − Σ min(n − 1, T) / (documents · T)."""
    kept = np.minimum(np.asarray(lengths) - 1, sequence_length)
    return 1 - mean(kept, weights) / sequence_length


def cut_share(lengths: np.ndarray, sequence_length: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the share of useful tokens cut off with one document per row: Σ max(n − 1 − T, 0) / Σ (n − 1)."""
    useful = np.asarray(lengths) - 1
    return ratio(np.maximum(useful - sequence_length, 0), useful, weights)


def cut_documents_share(lengths: np.ndarray, sequence_length: int, weights: np.ndarray | None = None) -> np.ndarray:
    return mean((np.asarray(lengths) - 1 > sequence_length).astype(float), weights)


def fill_share(lengths: np.ndarray, sequence_length: int, rows: int) -> float:
    """Return the share of positions with a useful label in packed rows, Σ (n − 1) / (rows · T)."""
    return float((np.asarray(lengths) - 1).sum() / (rows * sequence_length))


def bound_fill(lengths: np.ndarray, sequence_length: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return an upper bound of `fill_share`: rows without padding, with n − 1 useful tokens per piece of n tokens."""
    useful = np.asarray(lengths) - 1
    pieces = np.maximum(1, -(-useful // sequence_length))
    return ratio(useful, useful + pieces, weights) * (sequence_length + 1) / sequence_length


def core_share(tokens_per_s: Rate, tokenizer_tokens_per_s: Rate) -> Rate:
    """Return the cores that a rank needs to tokenize for a training at `tokens_per_s`: N / s."""
    return tokens_per_s / tokenizer_tokens_per_s


def stall_share(tokens_per_s: Rate, tokenizer_tokens_per_s: Rate) -> Rate:
    """Return the share of step time for tokenizing in the training thread, N / (N + s); N: the rate without a stall."""
    return tokens_per_s / (tokens_per_s + tokenizer_tokens_per_s)


def rate_at_stall(share: float, tokenizer_tokens_per_s: Rate) -> Rate:
    """Return the training rate at which tokenizing takes this share q of a step: N = s q / (1 − q)."""
    return tokenizer_tokens_per_s * share / (1 - share)


def mean(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    return values.mean() if weights is None else weights @ values / weights.sum(axis=-1)


def ratio(numerators: np.ndarray, denominators: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the ratio of sums (never a mean of rates); 0 for an empty denominator."""
    above, below = mean(numerators, weights), mean(denominators, weights)
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)


def bootstrap_weights(units: np.ndarray, count: int, resamples: int, seed: int) -> np.ndarray:
    """Return bootstrap weights, float64 [resamples, documents]: how often each document is drawn.

    `units` assigns documents to `count` units, which are drawn whole with replacement (Efron & Tibshirani 1993, chapter
    8), because documents that were sampled together are not independent.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    return drawn[:, np.asarray(units)]


def bound_unseen_cut(lengths: np.ndarray) -> tuple[float, float]:
    """Return upper 95 % bounds of the shares of cut documents, 1 − 0.05^(1/n), and of cut tokens if none of n documents
    is cut (rule of three: Hanley & Lippman-Hand 1983). The unknown length counts as the longest one seen.
    """
    useful = np.asarray(lengths) - 1
    share = 1 - 0.05 ** (1 / len(useful))
    lost = share * float(useful.max())
    return share, lost / max(1.0, float(useful.mean()) + lost)


def bound_count(seen: int) -> float:
    """Return an upper 97.5 % bound of a Poisson mean, given a count: within 4 % of the exact one (Garwood 1936)."""
    return seen + 1.96 * float(np.sqrt(seen + 1)) + 2


def interval(values: np.ndarray | Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of resampled values, including infinite ones."""
    ordered = np.sort(np.asarray(values, dtype=float))
    tail = (1 - 0.95) / 2 * (len(ordered) - 1)
    return float(ordered[int(np.floor(tail))]), float(ordered[int(np.ceil(len(ordered) - 1 - tail))])
