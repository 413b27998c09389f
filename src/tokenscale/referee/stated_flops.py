"""FLOPs per token that another program states, or that its MFU implies, and what was counted in
them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from tokenscale.analysis.runs import model
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token, weights
from tokenscale.referee.expectations import Evidence, NotCheckedError, expect
from tokenscale.settings.model import ModelSettings


@expect(
    "flops_per_token and mfu of another program",
    must="those of the model's shape, by a known convention",
    known_from="its shape",
    word="suspect",
    tolerance="0.5 %",
)
def _find_unexplained_flops(evidence: Evidence) -> Iterator[str]:
    if not evidence.row.get("external"):
        return
    shape = model(evidence.get("external"))
    row = evidence.row
    (tokens, seconds) = evidence.steps.totals()
    if shape is None or not row["sequence_length"]:
        raise NotCheckedError("the run describes no model")
    claims = {"it states ": row["flops_per_token_stated"]}
    if row["mfu_stated"] and row["peak_flops"] and tokens and row["world_size"]:
        implied = flops_of_mfu(
            row["mfu_stated"],
            tokens,
            seconds=seconds,
            peak_flops=row["peak_flops"],
            devices=row["world_size"],
        )
        claims[f"its MFU of {100 * row['mfu_stated']:.4g} % implies "] = implied
    for words, flops in claims.items():
        if (flops or 0) > 0 and (
            found := counted(flops, model=shape, sequence_length=row["sequence_length"])
        ).fault:
            yield words + found.words


#: stated and counted are the same up to this share
TOLERANCE = 0.005


class Counted(NamedTuple):
    """Stated FLOPs per token over those of the formula (6 N + 12 L d T), and what that is in words.

    `fault` is false for the formula itself and for other conventions that have a name: such a
    number may be compared with numbers of the same convention, and with no others.
    """

    ratio: float
    words: str
    fault: bool


def counted(stated: float, model: ModelSettings, sequence_length: int) -> Counted:
    """What a stated number of training FLOPs per token counts, for a model with its vocabulary
    (`with_vocabulary`).

    Raises ValueError for a number that is not above zero.

    >>> from tokenscale.settings.presets import PRESETS
    >>> counted(9.26e9, PRESETS["llama-1.4b-nemo"], 2048).words
    "FLOPs per token 1.21 × the formula's: the input embedding was counted (a wrapper such as DDP hides it)"
    """
    if not (math.isfinite(stated) and stated > 0):
        raise ValueError("FLOPs per token are above zero")
    full, causal = (
        flops_per_token(model, sequence_length, convention=of)
        for of in (Convention.FULL, Convention.CAUSAL)
    )
    again = hardware_flops_per_token(
        model,
        sequence_length,
        convention=Convention.FULL,
        checkpointing="block",
    )
    count = weights(model)
    ratio = stated / full
    # the formula's own number accuses nobody; of the others the nearest is meant
    if abs(ratio - 1) <= TOLERANCE:
        return Counted(ratio=ratio, words="FLOPs per token as the formula has it", fault=False)
    without = 6 * (count.total - count.looked_up)
    table = 6 * count.looked_up
    hidden = "the input embedding was counted (a wrapper such as DDP hides it)"
    readings = (
        ("attention as a causal mask leaves it", causal, False),
        ("attention was left out", without, False),
        ("what backward computes again was counted (HFU, not MFU)", again, False),
        (hidden, full + table, True),
        (f"{hidden}, attention as a causal mask leaves it", causal + table, True),
        (f"{hidden}, attention was left out", without + table, True),
        ("only the forward pass was counted", full / 3, True),
        ("a multiplication and its addition were counted as one", full / 2, True),
    )
    # a reading that gives the formula's own number here (tied embeddings: no table) explains
    # nothing
    apart = [
        (abs(stated / flops - 1), words, fault) for words, flops, fault in readings if flops != full
    ]
    off, words, fault = min(apart, key=lambda reading: reading[0])
    if off > TOLERANCE:
        words = "no known way of counting gives that"
        fault = True
    return Counted(
        ratio=ratio, words=f"FLOPs per token {ratio:.2f} × the formula's: {words}", fault=fault
    )


def flops_of_mfu(
    mfu: float, tokens: float, seconds: float, peak_flops: float, devices: int = 1
) -> float:
    """Return the FLOPs per token that a stated MFU (a share of 1) implies: mfu × devices × peak ×
    seconds / tokens.

    `tokens` are those of all devices, padding included. The source study's run on 4 GPUs:

    >>> round(flops_of_mfu(0.3789, 161_853.91, 1.0, 989e12, devices=4) / 1e9, 2)
    9.26
    """
    return mfu * devices * peak_flops * seconds / tokens
