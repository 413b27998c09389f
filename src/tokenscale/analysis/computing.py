"""Columns of what a token costs and of what a device can do, which own and other runs share."""

from typing import Any

from tokenscale.costs.peaks import find_peak

Row = dict[str, Any]

#: convention, as a record names it → column
FLOPS = {
    "full": "flops_per_token",
    "causal": "flops_per_token_causal",
    "hardware": "flops_per_token_hardware",
}
NUMBER_FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8")


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
