"""Clocks of a run's ranks and attempts against each other, and its speed against what its devices
can do.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenscale.referee.expectations import Evidence, NotCheckedError, Row, expect

#: fields of a step that cannot be below zero
NEVER_NEGATIVE = (
    *(
        "step",
        "data_wait_s",
        "own_s",
        "h2d_s",
        "forward_s",
        "backward_s",
        "bubble_s",
        "exposed_communication_s",
    ),
    *(
        "optimizer_s",
        "loss_sum",
        "useful_tokens",
        "total_tokens",
        "rows",
        "micro_steps",
        "learning_rate",
        "grad_norm",
    ),
    *("grad_norm_clipped", "memory_peak_bytes", "loss_scale"),
)
#: seconds by which wall clocks of one machine may differ
CLOCK_S = 60.0
#: seconds by which clocks of ranks on one boot may differ: a CPU's is one clock, a GPU's events are
#: read by the host
RANKS_S = 0.01
#: number format → FLOP/s that no core exceeds. fp32: two AVX-512 FMA units are 64 FLOP a cycle
#: (Intel Optimization Reference Manual, 248966), 0.4 TFLOP/s at 6 GHz. Others: an AMX tile unit is
#: 2,048 bf16 FLOP a cycle (the same, chapter 20), 12 TFLOP/s at 6 GHz. Twice that is out of reach
#: of every core.
CORE_FLOPS = {"fp32": 0.8e12}
ANY_CORE_FLOPS = 25e12
#: order in which a rank must report, once an attempt
ORDER = ("run_start", "init_done", "run_stop")


@expect(
    "counts, times and norms of steps",
    must="not negative",
    known_from="definition",
    word="invalid",
    tolerance="1 µs",
)
def _find_negative_values(evidence: Evidence) -> Iterator[str]:
    for name in NEVER_NEGATIVE:
        wrong = np.flatnonzero(evidence.raw[name] < (-1e-6 if name.endswith("_s") else 0))
        if len(wrong):
            yield (
                f"negative {name} ({evidence.raw[name][wrong[0]]:.6g} at step "
                f"{evidence.raw['step'][wrong[0]]:.0f})"
            )
    if (evidence.steps["step_s"] <= 0).any():
        yield "a step that took no time"


@expect(
    "FLOP/s",
    must="at most the peak of the devices or cores",
    known_from="device",
    word="invalid",
)
def _find_impossible_speeds(evidence: Evidence) -> Iterator[str]:
    row = evidence.row
    (tokens, seconds) = evidence.steps.totals() if len(evidence.steps) else (0.0, 0.0)
    flops = row.get("flops_per_token")
    nodes = len({event["boot"] for event in evidence.named("run_start")}) or 1
    peak = (row.get("peak_flops") or 0) * (row.get("world_size") or 0)
    cores = (row.get("cores") or 0) * nodes
    limit = (
        cores
        * CORE_FLOPS.get(row.get("number_format") or "", ANY_CORE_FLOPS)
        * (row.get("device_kind") == "cpu")
    )
    if not (flops and (peak or limit) and seconds > 0):
        raise NotCheckedError("FLOPs or the device's peak are not known")
    if peak and tokens * flops > peak * seconds:
        yield (
            f"MFU of {100 * tokens * flops / (peak * seconds):.0f} %: more than the devices can do"
        )
    rate = tokens * (row.get("flops_per_token_causal") or flops) / seconds
    if limit and rate > limit:
        speed = f"{tokens:,.0f} tokens in {seconds:.3g} s are {rate / 1e12:,.3g} TFLOP/s"
        yield f"{speed}: more than {cores} cores can do ({limit / 1e12:.3g})"


@expect(
    "outcome.ended_unix_s",
    must="the end of the logs",
    known_from="clocks",
    word="caution",
    tolerance=f"{CLOCK_S:g} s",
)
def _find_other_ends(evidence: Evidence) -> Iterator[str]:
    """Of a machine that slept the wall clock went on, and the logs' did not."""
    stops = (
        stop for stop in evidence.named("run_stop") if stop["attempt"] == evidence.get("attempt")
    )
    last = [stop["t_unix_s"] for stop in stops if stop["t_unix_s"] is not None]
    if (
        evidence.own
        and last
        and (apart := evidence.recorded("outcome.ended_unix_s") - max(last))
        and abs(apart) > CLOCK_S
    ):
        beside = "before" if apart < 0 else "after"
        yield f"ended_unix_s of run.json is {abs(apart):.4g} s {beside} the end of its logs"


@expect(
    "steps and clocks of attempts",
    must="each step, and each attempt, after the one before",
    known_from="logs",
    word="suspect",
)
def _find_attempts_out_of_order(evidence: Evidence) -> Iterator[str]:
    """Attempts of one boot of one machine by the monotonic clock, which nobody sets; else by the
    wall clock.
    """
    raw = evidence.raw
    boots = defaultdict(set)
    same = (np.diff(raw["attempt"]) == 0) & (np.diff(raw["rank"]) == 0)
    if (same & (np.diff(raw["step"]) != 1)).any():
        yield "steps skip or repeat inside an attempt"
    if (same & (np.diff(raw["t_mono_s"]) < 0)).any():
        yield "the monotonic clock goes back inside an attempt"
    for event in evidence.named("run_start"):
        boots[event["attempt"]].add(event["boot"])
    for earlier, later in itertools.combinations(np.unique(raw["attempt"]).tolist(), 2):
        one_boot = (
            boots[later] == boots[earlier] and len(boots[later] - {None}) == len(boots[later]) == 1
        )
        clock = raw["t_mono_s" if one_boot else "t_unix_s"]
        begun, ended = (clock[(raw["attempt"] == n) & np.isfinite(clock)] for n in (later, earlier))
        if len(begun) and begun.min() < ended.max(initial=-np.inf):
            yield (
                f"attempt {int(later)} took its first step before an earlier attempt had taken "
                "its last"
            )
            return


@expect(
    "clocks of ranks on one boot",
    must="each step's end on all ranks before the next one's on any",
    known_from="other ranks",
    word="suspect",
    tolerance=f"{RANKS_S:g} s",
)
def _find_ranks_apart(evidence: Evidence) -> Iterator[str]:
    """In each step every rank needs numbers from all others, which they send after the end of the
    step before; in the first step, after their set-up.
    """
    _ = evidence.own
    boots: dict[tuple[int, Any], set[int]] = defaultdict(set)
    ready: dict[tuple[int, int], float] = {}
    for event in evidence.events:
        if event["event"] == "run_start" and event["boot"]:
            boots[event["attempt"], event["boot"]].add(event["rank"])
        if event["event"] == "init_done" and event["t_mono_s"] is not None:
            ready[event["attempt"], event["rank"]] = event["t_mono_s"]
    logs = {(attempt, rank): rows for attempt, rank, rows in evidence.raw.logs()}
    for (attempt, _), ranks in boots.items():
        ends: dict[int, list[float]] = defaultdict(list)
        beside = ranks & {rank for of, rank in logs if of == attempt}
        for rank in beside if len(beside) > 1 else ():
            rows = logs[attempt, rank]
            steps = evidence.raw["step"][rows].astype(int).tolist()
            times = evidence.raw["t_mono_s"][rows].tolist()
            begin = ready.get((attempt, rank), times[0])
            for step, time in zip((steps[0] - 1, *steps), (begin, *times), strict=True):
                ends[step].append(time)
        for step in sorted(ends.keys() & {step - 1 for step in ends}):
            late = max(ends[step]) - min(ends[step + 1])
            if late > RANKS_S:
                ended = f"ended step {step}" if step >= steps[0] else "started"
                yield (
                    f"a rank ended step {step + 1} {late:.4g} s before another one had {ended} "
                    f"(attempt {attempt})"
                )
                break


@expect(
    "run_start, init_done, run_stop of each rank",
    must="once, in this order, as long apart as stated",
    known_from="clocks",
    word="suspect",
    tolerance="0.1 s and 1 %",
)
def _find_other_starts(evidence: Evidence) -> Iterator[str]:
    named: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for event in evidence.events:
        if event["event"] in ORDER:
            named[event["attempt"], event["rank"]].append(event)
    orders = {log: [event["event"] for event in events] for log, events in named.items()}
    if not all(map(_is_in_order, orders.values())):
        yield "events out of order or repeated inside an attempt"
        return
    last = max((attempt for attempt, _ in named), default=None)
    if evidence.row["status"] == "complete" and any(
        a == last and "run_stop" not in names for (a, _), names in orders.items()
    ):
        yield "a rank of the last attempt reported no run_stop"
    for (attempt, rank), events in named.items():
        if _goes_back(events):
            yield (
                f"the clock of attempt {attempt}, rank {rank} goes back between its start and "
                "its end"
            )
        if not evidence.row.get("external"):
            yield from _compare_start(rank, by_name={event["event"]: event for event in events})


def _is_in_order(names: list[str]) -> bool:
    return names == [name for name in ORDER if name in names]


def _goes_back(events: list[Row]) -> bool:
    """Return whether the monotonic clock of events in their order is set back."""
    times = [event["t_mono_s"] for event in events if event["t_mono_s"] is not None]
    return times != sorted(times)


def _compare_start(rank: int, by_name: dict[str, Row]) -> Iterator[str]:
    """Compare the duration of the start that a rank states with its clock."""
    if not {"run_start", "init_done"} <= by_name.keys():
        return
    took = by_name["init_done"]["t_mono_s"]
    stated = by_name["init_done"]["duration_s"]
    begun = by_name["run_start"]["t_mono_s"]
    if None in (took, stated, begun):
        return
    if abs(stated - (took - begun)) > 0.1 + 0.01 * (took - begun):
        yield (
            f"init_done of rank {rank} states {stated:.4g} s, its clock has {took - begun:.4g} s"
        )


@expect(
    "wall clocks of ranks on one boot, and started_unix_s",
    must="those of rank 0",
    known_from="clocks",
    word="suspect",
    tolerance=f"{CLOCK_S:g} s",
)
def _find_other_wall_clocks(evidence: Evidence) -> Iterator[str]:
    if evidence.row.get("external"):
        raise NotCheckedError("another program's clocks")
    offsets: dict[tuple[int, Any], dict[int, float]] = defaultdict(dict)
    first: dict[str, float] = {}
    for event in evidence.events:
        if event["t_unix_s"] is None or event["t_mono_s"] is None:
            continue
        if event["event"] == "run_start" and event["boot"]:
            offsets[event["attempt"], event["boot"]][event["rank"]] = (
                event["t_unix_s"] - event["t_mono_s"]
            )
        if event["attempt"] == evidence.get("attempt") and event["rank"] == 0:
            first[event["event"]] = event["t_unix_s"]
    for (attempt, _), of in offsets.items():
        apart = max(of.values()) - min(of.values())
        if apart > CLOCK_S:
            yield (
                f"wall clocks of ranks on one machine are {apart:.4g} s apart in attempt {attempt}"
            )
    started = evidence.get("started_unix_s")
    low = first.get("run_start")
    high = first.get("init_done")
    # the end may follow a clock change
    if isinstance(started, (int, float)) and low is not None and high is not None:
        apart = max(low - started, started - high)
        if apart > CLOCK_S:
            yield (
                f"started_unix_s of run.json is {apart:.4g} s "
                f"{'before' if started < low else 'after'} the log's"
            )
