"""Another program's run, from what its log states: its columns, and what of it does not hold."""

from typing import Any

from tokenscale.analysis.compliance import counted, flops_of_mfu
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.costs.flops import Convention, flops_per_token, parameters
from tokenscale.costs.peaks import find_peak
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import from_dict

Row = dict[str, Any]

#: convention, as a record names it → column
FLOPS = {
    "full": "flops_per_token",
    "causal": "flops_per_token_causal",
    "hardware": "flops_per_token_hardware",
}
NUMBER_FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8")

#: column → (the fact's name in the record, its type)
FACTS = {
    "approach": ("approach", str),
    "world_size": ("world_size", int),
    "sequence_length": ("sequence_length", int),
    "global_batch": ("global_batch", int),
    "steps_asked": ("steps", int),
    "model": ("model", str),
    "corpus": ("corpus", str),
    "tokenizer": ("tokenizer", str),
    "precision": ("precision", str),
    "micro_batch": ("micro_batch", int),
    "seed": ("seed", int),
    "parameters": ("parameters", int),
    "flops_per_token_stated": ("flops_per_token", float),
    "mfu_stated": ("mfu", float),
}
#: of these, what two runs must share to be compared: as `science` is for our own runs, whose settings say more
SHARED = ("sequence_length", "global_batch", "steps_asked", "model", "corpus", "tokenizer", "precision")


def columns(record: Row, row: Row) -> Row:
    """Columns of the table `runs`; a fact of another type counts as not stated."""
    stated = record["external"]
    found = {column: _of(stated.get(name), kind) for column, (name, kind) in FACTS.items()}
    found["science"] = "external-" + sha256_text(canonical_json({name: found[name] for name in SHARED}))[:16]
    shape, length = model(stated), found["sequence_length"]
    if shape is not None and length:
        costs = {convention.value: flops_per_token(shape, length, convention) for convention in Convention}
        found |= {column: costs.get(name) for name, column in FLOPS.items()}
        found["parameters"] = found["parameters"] or parameters(shape)
    return found | peak_columns(row, _of(stated.get("number_format"), str)) | {"external": True}


def model(stated: Row | None) -> ModelSettings | None:
    """The model with its vocabulary that a run describes; None where it describes none that can be read."""
    try:
        shape = from_dict(ModelSettings, stated["shape"])
    except (KeyError, UserError, TypeError, AttributeError, ValueError):
        return None
    return shape if shape.vocabulary_size is not None and shape.transformers is None else None


def doubts(record: Row, row: Row, tokens: float, seconds: float) -> list[str]:
    """What is wrong with the FLOPs that a run states, or that its MFU implies, in words. Needs its model's shape;
    `tokens` are all positions that all ranks computed on in `seconds`. Nothing of our own runs."""
    shape = model(record.get("external"))
    if shape is None or not row["sequence_length"]:
        return []
    claims = {"it states ": row["flops_per_token_stated"]}
    if row["mfu_stated"] and row["peak_flops"] and tokens and row["world_size"]:
        implied = flops_of_mfu(row["mfu_stated"], tokens, seconds, row["peak_flops"], row["world_size"])
        claims[f"its MFU of {100 * row['mfu_stated']:.4g} % implies "] = implied
    found = {
        words: counted(flops, shape, row["sequence_length"]) for words, flops in claims.items() if (flops or 0) > 0
    }
    return [words + of.words for words, of in found.items() if of.fault]


def _of(value: Any, kind: type) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    return kind(value) if fits else None


def peak_columns(row: Row, number: str | None) -> Row:
    """FLOP/s that a device of the row can do at most in a number format, with its source; null on CPUs and of what no
    table knows."""
    peak = find_peak(row["device"]) if row["device_kind"] == "cuda" and number in NUMBER_FORMATS else None
    flops = getattr(peak, number) if peak else None
    return {
        "number_format": number,
        "peak_flops": None if flops is None else flops * 1e12,
        "peak_source": None if flops is None else peak.source,
    }
