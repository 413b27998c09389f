"""Words and tables of `advise`: numbers with their intervals, 100 columns wide."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: null."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: float(n) if math.isfinite(n) else None for name, n in numbers.items()}


def render(facts: dict[str, Any]) -> str:
    """The facts for a terminal, 100 columns wide."""
    sampled, tokenizing, wanted = facts["sampled"], facts["tokenizing"], facts["sequence_length"]
    more = f" and {len(facts['files']) - 1:,} more" if len(facts["files"]) > 1 else ""
    lines = [
        f"{Path(facts['files'][0]).name}{more}",
        f"holds {_count(facts['documents'])} documents, {_bytes(facts['text_bytes'])} of text, "
        f"{_count(facts['tokens'])} tokens",
        f"looked at {sampled['documents']:,} documents ({sampled['text_bytes'] / 1e6:.1f} MB; {sampled['where']}); "
        "lo–hi: 95 % intervals",
        f"tokenizer {facts['tokenizer']['name']} by {facts['tokenizer']['engine']}: "
        f"{_count(tokenizing['tokens_per_core_s'])} tokens, {_bytes(tokenizing['text_bytes_per_core_s'])} a second on "
        "one core",
        "",
        "one document a row, cut or padded:                      packed rows:",
        f"{'row':>6}  {'padding':>13}  {'tokens cut':>13}  {'documents cut':>14}  {'useful':>15}  "
        f"{'useful tokens, x padded':>24}",
    ]
    for t, of in facts["sequence_lengths"].items():
        lines.append(
            f"{t:>6}  {percent(of['padding']):>13}  {percent(of['cut']):>13}  {percent(of['cut_documents']):>14}  "
            f"{percent(of['fill_packed'], 2):>15}  {as_times(of['gain']):>24}"
        )
    lines += [
        "",
        f"rows of {wanted}:",
        f"{'format':<11} {'tokens':>14} {'of them useful':>16} {'on disk':>16} {'tokenize and write':>20} "
        f"{'pays after epochs':>18}",
    ]
    for name, of in facts["formats"].items():
        pays = _number(of["break_even_epochs"], 1) if "break_even_epochs" in of else "unpacked first"
        lines.append(
            f"{name:<11} {_count(of['tokens']):>14} {_count(of['useful_tokens']):>16} {_bytes(of['bytes']):>16} "
            f"{_time(of['core_s_to_tokenize_and_write']):>20} {pays:>18}"
        )
    lines += ["", *_stall_lines(facts)]
    lines += ["", *_wrapped("choose", f"{facts['choice']}: {facts['reason']}.")]
    label = "next"
    for file, values in facts["configuration"].items():
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=80)
        lines += [f"{label:<6}  save as {file}:", "", *text.splitlines(), ""]
        label = "then"
    lines += [f"{label:<6}  {facts['next']}"]
    return "\n".join(lines)


def _stall_lines(facts: dict[str, Any]) -> list[str]:
    tokenizing, rate = facts["tokenizing"], facts["tokens_per_second"]
    if not rate:
        return [
            "tokenizing while training, in the training thread, takes 1 % of the step at "
            f"{_count(tokenizing['rate_at_stall_0.01'])} tokens/s,",
            f"10 % at {_count(tokenizing['rate_at_stall_0.1'])} tokens/s a rank "
            "(--tokens-per-second N says it for yours)",
        ]
    lines = [
        f"tokenizing while training at {rate:,.0f} tokens/s a rank: {percent(tokenizing['core_share'], 2)} of a core,",
        f"or {percent(tokenizing['step_share'], 2)} of the step in the training thread. One rank, {facts['epochs']:g} "
        f"epoch{'s' * (facts['epochs'] != 1)}, data in that thread:",
        f"{'approach':<20} {'step share of data':>18} {'an epoch':>18} {'all, with preparing':>20} "
        f"{'useful tokens/s':>18}",
    ]
    for approach, of in facts["approaches"].items():
        lines.append(
            f"{approach:<20} {percent(of['stall'], 2):>18} {_time(of['epoch_s']):>18} {_time(of['total_s']):>20} "
            f"{_count(of['useful_tokens_per_s']):>18}"
        )
    return lines


def _wrapped(label: str, text: str, width: int = 98) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) + 8 > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines.append(line)
    return [f"{label if i == 0 else '':<6}  {line}" for i, line in enumerate(lines)]


def _number(estimate: Estimate, digits: int) -> str:
    """lo–hi, rounded outwards, so that no more is claimed than holds; one number where both are the same.

    >>> _number(Estimate(1.5, 1.234, 1.567), 1), _number(Estimate(2.0, 2.0, 2.0), 2)
    ('1.2–1.6', '2.00')
    """
    if estimate.low == estimate.high and math.isfinite(estimate.low):
        return f"{estimate.value:.{digits}f}"
    low, high = (_outwards(estimate.low, digits, math.floor), _outwards(estimate.high, digits, math.ceil))
    return low if low == high else f"{low}–{high}"


def _outwards(number: float, digits: int, rounding: Callable[[float], int]) -> str:
    if not math.isfinite(number):
        return "never"
    scaled = round(number * 10**digits, 6)  # 0.3 is not 0.30000000000000004
    return f"{rounding(scaled) / 10**digits:.{digits}f}"


def percent(estimate: Estimate, digits: int = 1) -> str:
    """A share.

    >>> percent(Estimate(0.5, 0.4321, 0.5678))
    '43.2–56.8 %'
    """
    scaled = Estimate(*(100 * n for n in (estimate.value, estimate.low, estimate.high)))
    return f"{_number(scaled, digits)} %"


def as_times(estimate: Estimate) -> str:
    """A ratio.

    >>> as_times(Estimate(1.5, 1.444, 1.555))
    '1.44–1.56x'
    """
    return f"{_number(estimate, 2)}x"


def _scaled(estimate: Estimate, units: list[tuple[float, str]]) -> str:
    """In the largest unit that the value reaches, with three figures."""
    size, unit = next((u for u in units if estimate.value >= u[0]), units[-1])
    scaled = Estimate(*(n / size for n in (estimate.value, estimate.low, estimate.high)))
    digits = max(0, 2 - int(math.floor(math.log10(max(scaled.value, 1e-9))))) if size != 1 else 0
    return f"{_number(scaled, min(digits, 2))} {unit}".rstrip()


def _count(estimate: Estimate) -> str:
    if estimate.low == estimate.high and estimate.value < 1e6:
        return f"{estimate.value:,.0f}"
    return _scaled(estimate, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")])


def _bytes(estimate: Estimate) -> str:
    return _scaled(estimate, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def _time(estimate: Estimate) -> str:
    return _scaled(estimate, [(86400, "d"), (3600, "h"), (60, "min"), (1.0000001, "s"), (1e-3, "ms")])
