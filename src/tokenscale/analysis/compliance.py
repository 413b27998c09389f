"""Does a run's log support a number? valid, suspect or invalid, with the reasons in words."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.analysis import log_values
from tokenscale.analysis.expectations import Steps
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token, weights
from tokenscale.settings.model import ModelSettings

Row = dict[str, Any]

#: order in which a rank must report, once an attempt
ORDER = ("run_start", "init_done", "run_stop")


def check(
    run: Row, raw: Steps, steps: Steps, events: list[Row], spans: pa.Table, record: Row | None = None, *,
    changed: Sequence[str] = (), trouble: str | None = None, copies: Sequence[str] = (), doubts: Sequence[str] = (),
) -> tuple[str, str]:  # fmt: skip
    """Return the validity of a run and the reasons for it, separated by "; ".

    `run` is its row of the table `runs`, `raw` are all step rows of all attempts, `steps` the merged ones, `record` is
    run.json. `changed` names logs that differ from their sealed hash, `trouble` describes a damaged run.json, `copies`
    logs that repeat another one, `doubts` implausible statements of another program. Invalid: a number from this run
    would be wrong. Suspect: the numbers may be right, and a person should look.
    """
    invalid: list[str] = []
    suspect: list[str] = []
    if trouble:
        invalid.append(trouble)
    elif run.get("steps_asked") is None:
        invalid.append("the settings in run.json are not readable by this version")
    elif not run["sealed"]:
        ended = run["status"] != "running"
        (suspect if ended else invalid).append(
            "run.json does not match its seal" if ended else "the run has not ended (run.json is not sealed)"
        )
    diverged = run["status"] == "nonfinite"
    if diverged:
        invalid.append(_stop(run, steps))
    elif run["status"] not in ("complete", "running", "unreadable"):
        invalid.append(((record or {}).get("outcome") or {}).get("reason") or f"status {run['status']}")
    if changed:
        invalid.append(f"logs differ from the hashes sealed into run.json: {', '.join(changed)}")
    if not trouble and run.get("steps_asked") is not None:
        invalid += [] if diverged else _whole(run, steps)
        invalid += _tokens(run, steps)
        invalid += _too_good(run, steps)
        invalid += log_values.find_record_faults(record or {}, run, raw)
        invalid += log_values.find_faults(run, raw, steps, events, spans)
        suspect += log_values.find_doubts(run, steps, events, record or {})
    invalid += _world(run, events)
    invalid += copies
    suspect += doubts
    if changed_code := ((record or {}).get("outcome") or {}).get("code_changed"):
        suspect.append(f"source files were edited while it trained: {', '.join(map(str, changed_code))}")
    suspect += _monotone(raw)
    suspect += _apart(raw, events)
    suspect += _event_order(run, events)
    if (run.get("share") or 1) > 1:
        suspect.append(f"{run['share']} runs had its node at once: its times are not those of a run alone")
    red = run["quarantined"] - run["quarantined_benign"]
    if red:
        suspect.append(f"{red} broken log line{'s' * (red > 1)} that no killed process explains")
    validity = "invalid" if invalid else "suspect" if suspect else "valid"
    return validity, "; ".join(invalid + suspect)


def _first_nonfinite(steps: Steps) -> int | None:
    bad = (steps["nonfinite"] > 0) | (np.isnan(steps["loss_sum"]) & (steps["useful_tokens"] > 0))
    return int(steps["step"][bad].min()) if bad.any() else None


def _stop(run: Row, steps: Steps) -> str:
    """Why a run ended early whose training ran into a number that is not finite."""
    first = _first_nonfinite(steps)
    where = "" if first is None else f" at step {first} of {run.get('steps_asked') or 'an unknown number'}"
    return f"training stopped: loss or gradient not finite{where}"


def _whole(run: Row, steps: Steps) -> list[str]:
    """What a run that was not stopped must have: all of its steps, all of them finite."""
    found = []
    if not len(steps) and run["steps_asked"]:
        found.append("its logs hold no step")
    elif run["steps_seen"] != run["steps_asked"]:
        found.append(f"{run['steps_seen']} of {run['steps_asked']} steps are in the logs of all ranks")
    if (first := _first_nonfinite(steps)) is not None:
        found.append(f"loss or gradient not finite at step {first}")
    return found


def _tokens(run: Row, steps: Steps) -> list[str]:
    """Do the counts of tokens and rows add up?"""
    found = []
    if (steps["useful_tokens"] > steps["total_tokens"]).any():
        found.append("more useful tokens than tokens")
    whole = steps.whole()
    rows, tokens = steps.sums("rows"), steps.sums("total_tokens")
    for wrong in steps.numbers[whole & (rows != run["global_batch"])][:1]:
        held = int(rows[steps.numbers == wrong][0])
        found.append(f"ranks hold {held} rows at step {wrong}, the global batch is {run['global_batch']}")
    if length := run.get("sequence_length"):
        room = run["global_batch"] * length
        for wrong in steps.numbers[whole & (tokens > room)][:1]:
            held, shape = int(tokens[steps.numbers == wrong][0]), f"{run['global_batch']} rows of {length}"
            found.append(f"ranks report {held} tokens at step {wrong}, {shape} hold at most {room}")
    return found


def _too_good(run: Row, steps: Steps) -> list[str]:
    """Times that no machine can have: none at all, or more FLOPs than the devices can do in them."""
    found = []
    if (steps["step_s"] <= 0).any():
        found.append("a step that took no time")
    peak, flops, (tokens, seconds) = run.get("peak_flops"), run.get("flops_per_token"), steps.totals()
    if peak and flops and seconds and run.get("world_size"):
        share = tokens * flops / (peak * run["world_size"] * seconds)
        if share > 1:
            found.append(f"MFU of {100 * share:.0f} %: more than the devices can do")
    return found


def _world(run: Row, events: list[Row]) -> list[str]:
    seen = sorted({e["world_size"] for e in events if e["event"] == "run_start" and e["world_size"] is not None})
    if not seen:
        return ["no rank reported its start"] if run.get("world_size") is not None else []
    if run.get("world_size") is not None and seen != [run.get("world_size")]:
        return [f"ranks observed world size {', '.join(map(str, seen))}, asked was {run['world_size']}"]
    return []


def _monotone(raw: Steps) -> list[str]:
    """Inside the log of an attempt's rank, in the order of the file."""
    if len(raw) < 2:
        return []
    same = (np.diff(raw["attempt"]) == 0) & (np.diff(raw["rank"]) == 0)
    found = []
    if (same & (np.diff(raw["step"]) != 1)).any():
        found.append("steps skip or repeat inside an attempt")
    if (same & (np.diff(raw["t_mono_s"]) < 0)).any():
        found.append("the monotonic clock goes back inside an attempt")
    return found


def _apart(raw: Steps, events: list[Row]) -> list[str]:
    """An attempt begins after the one before has ended: two at once would be two trainings of one run.

    Of one boot of one machine by the monotonic clock, which nobody sets; else by the wall clock.
    """
    boots: dict[int, set[str | None]] = defaultdict(set)
    for event in events:
        if event["event"] == "run_start":
            boots[event["attempt"]].add(event["boot"])
    numbers = np.unique(raw["attempt"]).tolist()
    for place, later in enumerate(numbers):
        for earlier in numbers[:place]:
            one_boot = boots[later] == boots[earlier] and len(boots[later] - {None}) == len(boots[later]) == 1
            clock = raw["t_mono_s" if one_boot else "t_unix_s"]
            begun, ended = (clock[(raw["attempt"] == n) & np.isfinite(clock)] for n in (later, earlier))
            if len(begun) and begun.min() < ended.max(initial=-np.inf):
                return [f"attempt {int(later)} took its first step before an earlier attempt had taken its last"]
    return []


def _event_order(run: Row, events: list[Row]) -> list[str]:
    named: dict[tuple[int, int], list[str]] = defaultdict(list)
    for event in events:
        if event["event"] in ORDER:
            named[event["attempt"], event["rank"]].append(event["event"])
    found = []
    if any(names != [name for name in ORDER if name in names] for names in named.values()):
        found.append("events out of order or repeated inside an attempt")
    last = max((attempt for attempt, _ in named), default=None)
    ended = all("run_stop" in names for (attempt, _), names in named.items() if attempt == last)
    if run["status"] == "complete" and not ended:
        found.append("a rank of the last attempt reported no run_stop")
    return found


#: stated and counted are the same up to this share
TOLERANCE = 0.005


@dataclass(frozen=True)
class Counted:
    """Stated FLOPs per token over those of the formula (6 N + 12 L d T), and what that is in words.

    `fault` is false for the formula itself and for other conventions that have a name: such a number may be compared
    with numbers of the same convention, and with no others.
    """

    ratio: float
    words: str
    fault: bool


def counted(stated: float, model: ModelSettings, sequence_length: int, objective: str = "causal") -> Counted:
    """What a stated number of training FLOPs per token counts, for a model with its vocabulary (`with_vocabulary`).

    Raises ValueError for a number that is not above zero.

    >>> from tokenscale.settings.presets import PRESETS
    >>> counted(9.26e9, PRESETS["llama-1.4b-nemo"], 2048).words
    "FLOPs per token 1.21 × the formula's: the input embedding was counted (a wrapper such as DDP hides it)"
    """
    if not (math.isfinite(stated) and stated > 0):
        raise ValueError("FLOPs per token are above zero")
    formula = flops_per_token(model, sequence_length, Convention.FULL, objective)
    ratio = stated / formula
    first, *others = _readings(model, sequence_length, objective)
    apart = [(abs(stated / flops - 1), words, fault) for words, flops, fault in others]
    # the formula's own number accuses nobody; of the others the nearest is meant
    for off, words, fault in [(abs(ratio - 1), first[0], first[2]), min(apart, key=lambda reading: reading[0])]:
        if off <= TOLERANCE:
            return Counted(ratio, _sentence(ratio, words, fault), fault)
    return Counted(ratio, _sentence(ratio, "no known way of counting gives that", True), True)


def flops_of_mfu(mfu: float, tokens: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Return the FLOPs per token that a stated MFU (a share of 1) implies: mfu × devices × peak × seconds / tokens.

    `tokens` are those of all devices, padding included. The source study's run on 4 GPUs:

    >>> round(flops_of_mfu(0.3789, 161_853.91, 1.0, 989e12, devices=4) / 1e9, 2)
    9.26
    """
    return mfu * devices * peak_flops * seconds / tokens


def _readings(model: ModelSettings, length: int, objective: str) -> list[tuple[str, float, bool]]:
    """(what was counted, FLOPs per token, whether that is a fault); the formula first."""
    count = weights(model)
    full = flops_per_token(model, length, Convention.FULL, objective)
    causal = flops_per_token(model, length, Convention.CAUSAL, objective)
    without = 6 * (count.total - count.looked_up)
    table = 6 * count.looked_up
    again = hardware_flops_per_token(model, length, Convention.FULL, "block", objective)
    hidden = "the input embedding was counted (a wrapper such as DDP hides it)"
    found = [
        ("as the formula has it", full, False),
        ("attention as a causal mask leaves it", causal, False),
        ("attention was left out", without, False),
        ("what backward computes again was counted (HFU, not MFU)", again, False),
        (hidden, full + table, True),
        (f"{hidden}, attention as a causal mask leaves it", causal + table, True),
        (f"{hidden}, attention was left out", without + table, True),
        ("only the forward pass was counted", full / 3, True),
        ("a multiplication and its addition were counted as one", full / 2, True),
    ]
    # a reading that gives the formula's own number here (tied embeddings: no table) explains nothing
    return [found[0], *(reading for reading in found[1:] if reading[1] != full)]


def _sentence(ratio: float, words: str, fault: bool) -> str:
    if abs(ratio - 1) <= TOLERANCE and not fault:
        return f"FLOPs per token {words}"
    return f"FLOPs per token {ratio:.2f} × the formula's: {words}"
