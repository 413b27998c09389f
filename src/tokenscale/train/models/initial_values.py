"""Normal random numbers that depend on (seed, parameter name, row, column) alone, so that any part
can be made alone.

Each parameter has its own SplitMix64 stream (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators", figures 16 and 17): a counter in steps of an odd constant, then a
mixing function. Counter and step come from SHA-256 of seed and name. Word `row * ceil(columns / 2)
+ column // 2` has the bits of two neighbours: its lower half, a signed integer h, makes the even
column's value, its upper half the odd one's. The value is the inverse of the normal distribution
function at 1/2 + (h + 1/2) / 2**32, at most 6.4 standard deviations, by Acklam's rational
approximation (2003, relative error 1.2e-9).

Only operations are used that IEEE 754 rounds correctly, in float64 and one at a time: sums,
products, quotients and square roots. So every device, thread count and slicing gives the same bits.
"""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

#: elements worked on at once. On a CPU fewer than torch divides among threads: each thread has its
#: own, and none waits for another one after every operation
CHUNK = {"cpu": (1 << 15) - 1}
#: threads of a CPU; more would wait for the interpreter
THREADS = 4
CHUNK_OF_GPU = 1 << 24
#: multipliers of the mixing function: variant 13 of Stafford's, as in SplitMix64
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Acklam's coefficients, highest power first: numerator and denominator in the centre, then in the
#: tails
CENTRE = 0.47575
CENTRAL = (
    (
        -39.69683028665376,
        220.9460984245205,
        -275.9285104469687,
        138.3577518672690,
        -30.66479806614716,
        2.506628277459239,
    ),
    (
        -54.47609879822406,
        161.5858368580409,
        -155.6989798598866,
        66.80131188771972,
        -13.28068155288572,
        1.0,
    ),
)
TAIL = (
    (
        *(-0.007784894002430293, -0.3223964580411365, -2.400758277161838),
        *(-2.549732539343734, 4.374664141464968, 2.938163982698783),
    ),
    (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0),
)
#: log m = 2 s (1 + s² / 3 + s⁴ / 5 + …) with s = (m - 1) / (m + 1)
LOG_SERIES = tuple(1 / (2 * power + 1) for power in range(6, -1, -1))


def fill_normal(
    into: Tensor,
    seed: int,
    name: str,
    deviation: float,
    offsets: Sequence[int],
    whole: Sequence[int],
) -> None:
    """Fill `into` with the part [offsets, offsets + shape) of a matrix of shape `whole`: mean 0,
    `deviation`, rounded to fp32.
    """
    into = into.detach()
    (counter, step) = stream_of(seed, name)
    (rows, columns) = into.shape
    device = into.device
    first = offsets[1] // 2
    last = (offsets[1] + columns + 1) // 2
    skipped = offsets[1] - 2 * first
    pairs = torch.arange(first, last, device=device)
    at_once = max(1, CHUNK.get(device.type, CHUNK_OF_GPU) // max(columns, 1))

    def fill_rows(begin: int) -> None:
        row = torch.arange(
            offsets[0] + begin, offsets[0] + min(begin + at_once, rows), device=device
        )
        words = random_words(row[:, None] * ((whole[1] + 1) // 2) + pairs, counter, step=step)
        values = normal_of(centred_uniform_of(words).flatten()).mul_(deviation).float()
        into[begin : begin + at_once].copy_(
            values.view(len(row), -1)[:, skipped : skipped + columns]
        )

    begins = range(0, rows, at_once)
    threads = min(torch.get_num_threads(), THREADS, len(begins)) if device.type == "cpu" else 1
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill_rows, begins))
    else:
        list(map(fill_rows, begins))


def stream_of(seed: int, name: str) -> tuple[int, int]:
    """Return first counter and step of a parameter's stream, as signed 64-bit integers. The step is
    odd, and has the 24 changes of bits or more that SplitMix64 asks for.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    counter = int.from_bytes(digest[:8], "little")
    step = int.from_bytes(digest[8:16], "little") | 1
    if (step ^ (step >> 1)).bit_count() < 24:
        step ^= 0xAAAAAAAAAAAAAAAA
    return _signed(counter), _signed(step)


def random_words(index: Tensor, counter: int, step: int) -> Tensor:
    """Return a word of 64 random bits for each index, as int64. Changes `index`."""
    word = index.mul_(step).add_(counter)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        word.bitwise_xor_(_shift_right(word, bits=shift)).mul_(_signed(multiplier))
    return word.bitwise_xor_(_shift_right(word, bits=31))


def centred_uniform_of(words: Tensor) -> Tensor:
    """Return uniform numbers in (-1/2, 1/2), float64, two for each word: [..., n] → [..., 2 n]."""
    return words.view(torch.int32).double().add_(0.5).mul_(2.0**-32)


def normal_of(centred: Tensor) -> Tensor:
    """Return the inverse of the standard normal distribution function at 1/2 + `centred`; [n] →
    [n], float64.
    """
    found = _ratio(CENTRAL, x=centred.square()).mul_(centred)
    beyond = (centred.abs() > CENTRE).nonzero()[:, 0]
    sides = centred[beyond]
    tails = _ratio(TAIL, x=_log(0.5 - sides.abs()).mul_(-2).sqrt_())
    found[beyond] = torch.where(sides < 0, tails, -tails)
    return found


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    numerator, denominator = (_polynomial(powers, x) for powers in coefficients)
    return numerator.div_(denominator)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluate by Horner's rule, with a rounding after every operation: no fused multiply-add."""
    value = x.mul(coefficients[0])
    for coefficient in coefficients[1:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[-1])


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 numbers, from their bits: torch's own may differ
    between devices.
    """
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = mantissa > math.sqrt(2)
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    exponent = (exponent + large).double()
    ratio = (mantissa - 1).div_(mantissa + 1)
    return (
        _polynomial(LOG_SERIES, x=ratio.square())
        .mul_(ratio)
        .mul_(2)
        .add_(exponent.mul_(math.log(2)))
    )


def _shift_right(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
