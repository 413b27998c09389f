"""Times in a run's logs against each other, against its clocks, and against what its devices can
do.

On a CPU `step_s` is the difference of two readings of the clock of `t_mono_s`
(`train/phase_timer.py`): both agree to the nanosecond. On a GPU events are timed by the device and
`t_mono_s` by the host, and another program's log may be as inexact as it likes: there a share of
the step is allowed.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenscale.analysis.expectations import Evidence, NotCheckedError, Row, expect

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
#: phases of a step that do not overlap (`PhaseTimer`'s laps)
PHASES = ("h2d_s", "forward_s", "backward_s", "bubble_s", "exposed_communication_s", "optimizer_s")
#: seconds that two readings of one clock may differ by, and what other clocks may: seconds, and a
#: share of the step
EXACT_S = 1e-5
LOOSE_S = 0.01
LOOSE_SHARE = 0.01
#: seconds by which wall clocks of one machine may differ
CLOCK_S = 60.0
#: number format → FLOP/s that no core exceeds. fp32: two AVX-512 FMA units are 64 FLOP a cycle
#: (Intel Optimization Reference Manual, 248966), 0.4 TFLOP/s at 6 GHz. Others: an AMX tile unit is
#: 2,048 bf16 FLOP a cycle (the same, chapter 20), 12 TFLOP/s at 6 GHz. Twice that is out of reach
#: of every core.
CORE_FLOPS = {"fp32": 0.8e12}
ANY_CORE_FLOPS = 25e12
#: events with a duration that lie between two steps
BETWEEN = ("validation", "checkpoint", "translation")
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
    "phases of a step and its wait",
    must="together at most step_s",
    known_from="same record",
    word="invalid",
    tolerance="10 µs; 5 % on a GPU",
)
def _find_excess_phases(evidence: Evidence) -> Iterator[str]:
    """The host of a GPU waits for data ahead of the device, so that only the sums of waits are
    compared there.
    """
    raw = evidence.raw
    exact = evidence.row.get("device_kind") == "cpu" and not evidence.row.get("external")
    took = raw["step_s"]
    wait = np.nan_to_num(raw["data_wait_s"])
    if not evidence.row.get("external"):
        phases = sum((np.nan_to_num(raw[name]) for name in PHASES), np.zeros(len(took)))
        phases += wait if exact else 0
        longer = np.flatnonzero(phases > took * (1 if exact else 1.001) + EXACT_S)
        if len(longer):
            at = longer[0]
            if wait[at] > took[at] + EXACT_S:
                times = f"{wait[at]:.6g} s in {took[at]:.6g} s"
                yield f"a wait longer than its step ({times} at step {raw['step'][at]:.0f})"
            else:
                text = (
                    f"the phases of step {raw['step'][at]:.0f} last {phases[at]:.6g} s, the step "
                    f"{took[at]:.6g} s"
                )
                yield f"{text} (so at {len(longer)} of {len(took)} rows)"
    if not exact and np.nansum(wait) > 1.05 * np.nansum(took) + 1.0:
        yield f"waits for data of {np.nansum(wait):.3g} s in steps of {np.nansum(took):.3g} s"


@expect(
    *(
        "times of steps and events in each log",
        "what its clocks leave for them",
        "clocks",
        "invalid",
    ),
    tolerance="10 µs; 10 ms and 1 % on a GPU",
)
def _find_clock_errors(evidence: Evidence) -> Iterator[str]:
    if not len(evidence.raw):
        raise NotCheckedError("the logs hold no step")
    by_log: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for event in evidence.events:
        by_log[event["attempt"], event["rank"]].append(event)
    marks = _find_marks(evidence.events)
    pauses: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in evidence.spans.select(["attempt", "rank", "start_mono_s", "duration_s"]).to_pylist():
        if row["start_mono_s"] is not None and (row["duration_s"] or 0) > 0:
            pauses[row["attempt"], row["rank"]].append((row["start_mono_s"], row["duration_s"]))
    for attempt, rank, rows in evidence.raw.logs():
        log = _RankLog(evidence=evidence, rows=rows, events=by_log[attempt, rank])
        for text in log.find_faults(marks[attempt], pauses=pauses[attempt, rank]):
            yield f"{text} (attempt {attempt}, rank {rank})"


class _RankLog:
    """Clocks of one rank in one attempt."""

    def __init__(self, evidence: Evidence, rows: slice, events: list[Row]):
        self.own = not evidence.row.get("external")
        self.exact = evidence.row.get("device_kind") == "cpu" and self.own
        self.step, self.ended, self.took = (
            evidence.raw[name][rows] for name in ("step", "t_mono_s", "step_s")
        )
        self.offset = evidence.raw["t_unix_s"][rows] - self.ended
        self.events = events
        self.slack = (
            np.full(len(self.step), EXACT_S)
            if self.exact
            else LOOSE_S + LOOSE_SHARE * np.abs(self.took)
        )
        begun = self._time("init_done", first=True)
        self.before = np.concatenate([[begun], self.ended[:-1]])
        self.gap = self.ended - self.before - self.took
        #: rows whose predecessor is the step before; of the first row the end of the set-up
        self.follows = np.concatenate([[math.isfinite(begun)], np.diff(self.step) == 1])

    def find_faults(
        self, marks: dict[int, float], pauses: list[tuple[float, float]]
    ) -> Iterator[str]:
        """`marks`: step → recorded seconds before it; `pauses`: (begin, seconds) of spans."""
        wrong = np.flatnonzero(self.follows & (self.gap < -self.slack))
        if len(wrong):
            at = wrong[0]
            text = (
                f"step_s exceeds the time that t_mono_s leaves for it at {len(wrong)} of "
                f"{len(self.step)} steps"
            )
            between = self.ended[at] - self.before[at]
            yield f"{text}: {self.took[at]:.6g} s in {between:.6g} s at step {self.step[at]:.0f}"
        yield from self._find_unrecorded(marks, pauses)
        yield from self._find_misplaced_events()
        # wall-clock times of a log are its monotonic times plus one constant (`Writer.unix_s`)
        pairs = [(e["t_unix_s"], e["t_mono_s"]) for e in self.events]
        offsets = np.concatenate(
            [self.offset, [u - m for u, m in pairs if u is not None and m is not None]]
        )
        offsets = offsets[np.isfinite(offsets)]
        if len(offsets) and np.ptp(offsets) > (1e-3 if self.own else CLOCK_S):
            yield (
                "the wall clock and the monotonic clock of the log diverge by "
                f"{np.ptp(offsets):.4g} s"
            )

    def _time(self, name: str, first: bool) -> float:
        times = [
            e["t_mono_s"] for e in self.events if e["event"] == name and e["t_mono_s"] is not None
        ]
        if not times:
            return math.nan
        if first:
            return times[0]
        return times[-1]

    def _find_unrecorded(
        self, marks: dict[int, float], pauses: list[tuple[float, float]]
    ) -> Iterator[str]:
        """Time between two steps belongs to a validation, a checkpoint or a span that is recorded
        there.
        """
        places = np.array([-2, *sorted(marks)])
        seconds_of = np.array([0.0, *(marks[step] for step in sorted(marks))])
        at_mark = np.clip(np.searchsorted(places, self.step), 0, len(places) - 1)
        known = places[at_mark] == self.step
        recorded = np.where(known, seconds_of[at_mark], 0.0)
        for begin, seconds in pauses:
            at = int(np.searchsorted(self.ended, begin))
            if at < len(recorded):
                recorded[at] += seconds
                known[at] = True
        inside = self.follows & np.isfinite(self.gap) & (self.gap > self.slack)
        inside[0] = False  # state is loaded and the first validation runs before it
        gaps = np.where(inside, self.gap, 0.0)
        elapsed = float(np.nansum(np.diff(self.ended))) or math.nan
        bare = inside & ~known
        # a killed process has not logged its last checkpoint
        cut = math.isnan(self._time("run_stop", first=False))
        allowed = 0 if self.exact else 0.1 * elapsed
        if bare.sum() > 2 * cut and gaps[bare].sum() > allowed:
            text = (
                f"at {bare.sum()} of {len(self.step)} steps where nothing else is recorded: "
                f"{gaps[bare].sum():.3g} s"
            )
            yield (
                f"step_s falls short of t_mono_s {text} of {elapsed:.3g} s, from step "
                f"{self.step[bare][0]:.0f} on"
            )
        stated = recorded[known & inside].sum() + marks.get(-1, 0.0)
        more = gaps[known].sum() - 2 * stated - 0.1 * known.sum()
        if more > max(0.0, 0.05 * elapsed):
            text = f"are explained by {stated:.3g} s of validation, checkpoints and pauses"
            yield f"{gaps[known].sum():.3g} s between steps {text}"

    def _find_misplaced_events(self) -> Iterator[str]:
        """A validation lies between the steps that it is between; the end of the run lies behind
        its last step.
        """
        slack = (
            EXACT_S
            if self.exact
            else LOOSE_S + LOOSE_SHARE * float(np.nanmax(self.took, initial=0.0))
        )
        for event in self.events:
            time = event["t_mono_s"]
            step = event["step"]
            if time is None:
                continue
            if event["event"] == "validation" and self.own and step is not None:
                before, after = (np.flatnonzero(self.step == k) for k in (step - 1, step))
                begun = time - (event["duration_s"] or 0.0)
                wrong = (self.ended[before] > begun + slack).any()
                wrong |= ((self.ended - self.took)[after] < time - slack).any()
            else:
                wrong = event["event"] == "run_stop" and (self.ended > time + slack).any()
            if wrong:
                yield (
                    f"{event['event']} (step {step}) was logged at a time when the steps beside "
                    "it ran"
                )
                return


def _find_marks(events: list[Row]) -> dict[int, dict[int, float]]:
    """Attempt → step → seconds of what was recorded before that step, on whichever rank; −1: before
    an unknown one.
    """
    marks: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        step = event["step"]
        if event["event"] == "checkpoint":
            named = re.fullmatch(r"step=(\d+)", event["status"] or "")
            step = int(named[1]) if named else -1
        if event["event"] in BETWEEN and step is not None:
            marks[event["attempt"]][step] += max(0.0, event["duration_s"] or 0.0)
    return marks


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
    "run_start, init_done, run_stop of each rank",
    must="once, in this order, as long apart as stated",
    known_from="clocks",
    word="suspect",
    tolerance="0.25 s and 5 %",
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
    if abs(stated - (took - begun)) > 0.25 + 0.05 * (took - begun):
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
