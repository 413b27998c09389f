"""Accounting of a run: which events it may hold follows from its settings, and each second between
its start and its stop belongs to set-up, to a phase of a step, or to a planned event. What is left
over is named.

On a CPU `step_s` is the difference of two readings of the clock of `t_mono_s`, and its phases, the
wait for the batch and the host's bookkeeping add up to it (`train/phase_timer.py`). On a GPU events
are timed by the device and `t_mono_s` by the host, and another program's log may be as inexact as
it likes: there a share of the step is allowed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tokenscale.costs.schedule import epoch_ends
from tokenscale.referee.clocks import CLOCK_S
from tokenscale.referee.expectations import Evidence, NotCheckedError, Row, expect
from tokenscale.settings.run import OURS, RunSettings, start_step

#: phases of a step that do not overlap (`PhaseTimer`'s laps)
PHASES = ("h2d_s", "forward_s", "backward_s", "bubble_s", "exposed_communication_s", "optimizer_s")
#: events that stand between two steps and last
BETWEEN = ("validation", "checkpoint", "translation")
#: seconds that two readings of one clock may differ by, and what other clocks may: seconds, and a
#: share of the step
EXACT_S = 1e-5
LOOSE_S = 0.01
LOOSE_SHARE = 0.01


class Allowance(NamedTuple):
    """Time that may be left over: seconds, and a share of the time that is beside it."""

    seconds: float
    share: float

    def beside(self, time_s: Any) -> Any:
        """Return the seconds allowed beside a time, a number or an array."""
        return self.seconds + self.share * time_s


#: what may be left over of a step (its median, and any single one, in which the process may have
#: waited for a core), of all, between two steps, and before the first or after the last one. In 75
#: logs of ranks, some beside other work on the cores, it was at most 0.8 ms, 18 ms, 63 ms and 0.43 s.
LEFT_IN_STEPS = Allowance(2e-4, share=1e-3)
LEFT_IN_A_STEP = Allowance(0.05, share=0.1)
LEFT_IN_ALL = Allowance(0.05, share=0.01)
LEFT_BETWEEN = Allowance(0.25, share=0.25)
LEFT_AT_ENDS = Allowance(5.0, share=0.25)
#: steps whose median tells what each leaves over: of fewer, most may have waited for a core
FEWEST_STEPS = 5
#: share of steps by which the allowances of the median and of all steps grow for each further process
#: of a core, by the recorded load: at a load of 8 to 11 on two cores up to 1.3 % was left over
LEFT_TO_OTHERS = 0.005
#: at most so many further processes of a core count
MOST_OTHERS = 8.0

#: (attempt, rank)
Log = tuple[int, int]
#: attempt → step → seconds that are recorded before it; −1: before a step that is not known
Spent = Mapping[int, Mapping[int, float]]


# -- events


@expect(
    "events and their steps",
    must="as often as settings and attempts plan, at no other step",
    known_from="settings",
    word="invalid",
)
def _find_unplanned_events(evidence: Evidence) -> Iterator[str]:
    plan = _plan_events(evidence, evidence.own)
    spans = _find_spans(evidence)
    seen: set[tuple] = set()
    found: dict[str, set[int]] = defaultdict(set)
    for event in evidence.events:
        kind = event["event"]
        step = _find_step(event)
        allowed = plan.get(kind, set()) | _plan_attempt(event, spans.get(event["attempt"]))
        if event["attempt"] not in spans and kind not in plan:
            continue  # it was killed before its first step
        if kind not in STARTS and step is not None and step not in allowed:
            expected = ", ".join(map(str, sorted(allowed)[:4])) or "none"
            yield f"a {kind} at step {step}, against the settings (planned: {expected})"
            return
        names = ("attempt", "rank", "event", "step", "status", "corpus", "number")
        if (key := tuple(event[name] for name in names)) in seen:
            yield f"{kind} (step {step}) is logged twice by rank {event['rank']}"
            return
        seen.add(key)
        found[kind].add(-1 if step is None else step)
    yield from _find_missing_starts(evidence)
    if evidence.row["status"] != "complete" or not len(evidence.steps):
        raise NotCheckedError("the run did not end")
    kinds = ["validation", "source_validation", "translation"]
    if len(spans) == 1:
        kinds.append("checkpoint")
    for kind in kinds:
        if missing := sorted(plan[kind] - found[kind] - {-1}):
            yield f"no {kind} at step {missing[0]} ({len(missing)} so), against the settings"


@expect(
    "pairs that are translated",
    must="the first pairs of the corpus, equally many at each planned step, at most `validation.bleu`",
    known_from="settings",
    word="invalid",
)
def _find_other_pairs(evidence: Evidence) -> Iterator[str]:
    """Pairs are numbered as they lie in the corpus; BLEU is of those in the logs."""
    asked = evidence.own.validation.bleu
    numbers: dict[int, set[int]] = defaultdict(set)
    for event in evidence.named("translation"):
        numbers[event["step"]].add(event["number"])
    if numbers and evidence.row["status"] != "complete":
        raise NotCheckedError("the run did not end")
    for step, found in sorted(numbers.items()):
        if found != set(range(len(found))) or len(found) > asked:
            first = min(set(range(len(found) + 1)) - found)
            yield (
                f"{len(found)} pairs are translated at step {step}, of the first {asked} those "
                f"before pair {first}"
            )
            return
    if len(counts := {len(found) for found in numbers.values()}) > 1:
        yield f"{min(counts)} pairs are translated at one step and {max(counts)} at another"


def _find_missing_starts(evidence: Evidence) -> Iterator[str]:
    """Each rank logs its start and set-up before its steps, and all or none what their first step
    holds.
    """
    ranks: dict[tuple[int, str], set[int]] = defaultdict(set)
    for event in evidence.events:
        ranks[event["attempt"], event["event"]].add(event["rank"])
    for attempt, rank, _ in evidence.raw.logs():
        stopped = ranks[attempt, "run_stop"]
        for kind in (*STARTS, "memory"):
            of = ranks[attempt, kind]
            if rank not in of and (kind in STARTS or (of and rank in stopped)):
                yield f"no {kind} of rank {rank}, though it took steps (attempt {attempt})"
                return


#: events of the set-up, which have no step
STARTS = ("run_start", "init_done")


def _plan_events(evidence: Evidence, run: RunSettings) -> dict[str, set[int]]:
    """Return event → steps at which the settings plan it, for events that a run has in whatever
    attempts it is made; a best checkpoint and the final weights name no step (−1).
    """
    numbers = evidence.steps.numbers.tolist()
    if not numbers:
        raise NotCheckedError("the logs hold no step")
    begin = start_step(run)
    end = numbers[-1] + 1
    between = range(begin + 1, end)
    epochs: set[int] = set()
    if run.validation.each_epoch or run.validation.bleu_each_epoch or run.checkpoints.each_epoch:
        if isinstance(evidence.recount.counted, str):
            raise NotCheckedError("the rows of an epoch are not at hand")
        epoch: Fraction = evidence.recount.counted.rows_per_epoch
        batch = run.global_batch
        epochs = {k for k in between if epoch_ends(k - 1, rows_per_epoch=epoch, global_batch=batch)}

    def plan(every: int, each_epoch: bool, at_start: bool, at_end: bool) -> set[int]:
        steps = {k for k in between if every and k % every == 0}
        if each_epoch:
            steps |= epochs
        if at_start and begin == 0:
            steps.add(0)
        if at_end:
            steps.add(end)
        return steps

    policy = run.validation
    saved = run.checkpoints
    validations = plan(policy.every, policy.each_epoch, policy.at_start, policy.at_end)
    if not policy.rows:
        validations = set()
    states = plan(saved.every, saved.each_epoch, saved.at_start, saved.keep_resume_state)
    stopped = {
        event["step"] for event in evidence.named("run_stop") if event["status"] == "interrupted"
    }
    return {
        "validation": validations,
        "source_validation": validations if run.mixture is not None else set(),
        "checkpoint": states | stopped | ({-1} if saved.best or saved.final else set()),
        "translation": plan(0, policy.bleu_each_epoch, False, True) if policy.bleu else set(),
    }


def _plan_attempt(event: Row, span: tuple[int, int] | None) -> set[int]:
    """Return the steps at which an attempt of these first and last steps has such an event."""
    if span is None:
        return set()
    first, last = span
    return {
        "resume": {first} if first else set(),
        "memory": {first},
        "compilation": {first + 1, last + 1},
        "run_stop": {last + (event["status"] != "nonfinite")},
    }.get(event["event"], set())


def _find_spans(evidence: Evidence) -> dict[int, tuple[int, int]]:
    """Return attempt → its first and last step on any rank."""
    spans: dict[int, tuple[int, int]] = {}
    for attempt, _, rows in evidence.raw.logs():
        low, high = spans.get(attempt, (1 << 62, -1))
        steps = evidence.raw["step"][rows]
        spans[attempt] = min(low, int(steps.min())), max(high, int(steps.max()))
    return spans


def _find_step(event: Row) -> int | None:
    """Return the step of an event; −1 for a checkpoint whose folder names none."""
    if event["event"] != "checkpoint":
        return event["step"]
    named = re.fullmatch(r"step=(\d+)", event["status"] or "")
    return int(named[1]) if named else -1


# -- seconds


def plan_phases(run: RunSettings) -> dict[str, bool]:
    """Return phase of a step → whether a rank of this run's layout may have one."""
    layout = run.layout
    # the first and the last stage add up the gradients of the weight that they share
    share_a_weight = layout.pipeline > 1 and run.model.tied_embeddings
    return {
        "bubble_s": layout.pipeline > 1,
        "exposed_communication_s": layout.world_size > layout.pipeline or share_a_weight,
    }


@expect(
    "bubble_s and exposed_communication_s",
    must="logged only where ranks wait for stages or exchange",
    known_from="layout",
    word="invalid",
)
def _find_unplanned_phases(evidence: Evidence) -> Iterator[str]:
    for name, is_planned in plan_phases(evidence.own).items():
        if not is_planned and (rows := np.nan_to_num(evidence.raw[name]) > 0).any():
            yield f"{rows.sum()} steps have {name}, which this layout has not"


@expect(
    "seconds of each rank between its start and its stop",
    must="set-up, phases of steps and planned events, each second once",
    known_from="clocks",
    word="invalid",
    tolerance="10 µs; 10 ms and 1 % on a GPU; left over of a step 0.2 ms and 0.1 %, between steps 0.25 s "
    "and 25 %",
)
def _find_unaccounted_seconds(evidence: Evidence) -> Iterator[str]:
    if not len(evidence.raw):
        raise NotCheckedError("the logs hold no step")
    events: dict[Log, list[Row]] = defaultdict(list)
    ready: dict[int, float] = defaultdict(float)
    for event in evidence.events:
        events[event["attempt"], event["rank"]].append(event)
        if event["event"] == "init_done":
            ready[event["attempt"]] = max(ready[event["attempt"]], event["t_unix_s"] or 0.0)
    spent = _sum_events(evidence.events)
    pauses: dict[Log, list[tuple[float, float]]] = defaultdict(list)
    for row in evidence.spans.select(["attempt", "rank", "start_mono_s", "duration_s"]).to_pylist():
        if row["start_mono_s"] is not None and (row["duration_s"] or 0) > 0:
            pauses[row["attempt"], row["rank"]].append((row["start_mono_s"], row["duration_s"]))
    for attempt, rank, rows in evidence.raw.logs():
        account = _Account(
            evidence,
            rows,
            events=events[attempt, rank],
            spent=spent[attempt],
            pauses=pauses[attempt, rank],
            ready_unix_s=ready[attempt],
        )
        for text in account.find_faults():
            yield f"{text} (attempt {attempt}, rank {rank})"


def _sum_events(events: list[Row]) -> Spent:
    """Return the seconds that events take before each step: those of the rank that logs most."""
    by_rank: dict[tuple[int, int, int], float] = defaultdict(float)
    for event in events:
        if event["event"] in BETWEEN and (step := _find_step(event)) is not None:
            by_rank[event["attempt"], step, event["rank"]] += max(0.0, event["duration_s"] or 0.0)
    spent: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (attempt, step, _), seconds in by_rank.items():
        spent[attempt][step] = max(spent[attempt][step], seconds)
    return spent


class _Account:
    """Seconds of one rank in one attempt."""

    def __init__(
        self,
        evidence: Evidence,
        rows: slice,
        events: list[Row],
        spent: Mapping[int, float],
        pauses: list[tuple[float, float]],
        ready_unix_s: float,
    ):
        raw = evidence.raw
        self.own = not evidence.row.get("external")
        self.exact = evidence.row.get("device_kind") == "cpu" and self.own
        self.ours = self.exact and evidence.run is not None and evidence.run.arm == OURS
        load = evidence.get("hardware.load_average_1min")
        cores = evidence.get("hardware.cores")
        is_known = isinstance(load, (int, float)) and isinstance(cores, int) and cores > 0
        others = max(0.0, load / cores - 1) if is_known else 0.0
        self.to_others = LEFT_TO_OTHERS * min(others, MOST_OTHERS)
        self.overlaps = evidence.run is None or evidence.run.checkpoints.asynchronous
        self.step, self.ended, self.took = (
            raw[name][rows] for name in ("step", "t_mono_s", "step_s")
        )
        self.offset = raw["t_unix_s"][rows] - self.ended
        self.wait = np.nan_to_num(raw["data_wait_s"][rows])
        self.bookkeeping = raw["own_s"][rows]
        self.phases = sum((np.nan_to_num(raw[name][rows]) for name in PHASES), np.zeros(1))
        self.events = events
        self.spent = spent
        self.slack = (
            np.full(len(self.step), EXACT_S)
            if self.exact
            else LOOSE_S + LOOSE_SHARE * np.abs(self.took)
        )
        self.begun = self._time("init_done")
        self.stopped = self._time("run_stop")
        #: seconds that the rank waits, set up, for the last one
        self.waited = max(0.0, ready_unix_s - self.begun - self.offset[0])
        cpu_s = sum(event["cpu_s"] or 0.0 for event in events if event["event"] == "run_stop")
        #: seconds of a step for one of processor time: more than one where it waits for a core
        self.stretch = max(1.0, float(np.nansum(self.took)) / (cpu_s or math.inf))
        self.before = np.concatenate([[self.begun], self.ended[:-1]])
        self.gap = self.ended - self.before - self.took
        #: rows whose predecessor is the step before; of the first row the end of the set-up
        self.follows = np.concatenate([[math.isfinite(self.begun)], np.diff(self.step) == 1])
        #: seconds that are recorded before each row
        self.explained = np.array([spent.get(int(step), 0.0) for step in self.step])
        self.known = np.array([int(step) in spent for step in self.step])
        for begin, seconds in pauses:
            at = int(np.searchsorted(self.ended, begin))
            if at < len(self.step):
                self.explained[at] += seconds
                self.known[at] = True

    def _time(self, name: str) -> float:
        times = [e["t_mono_s"] for e in self.events if e["event"] == name]
        return times[0] if times and times[0] is not None else math.nan

    def find_faults(self) -> Iterator[str]:
        wrong = np.flatnonzero(self.follows & (self.gap < -self.slack))
        if len(wrong):
            at = wrong[0]
            between = self.ended[at] - self.before[at]
            yield (
                f"step_s exceeds the time that t_mono_s leaves for it at {len(wrong)} of "
                f"{len(self.step)} steps: {self.took[at]:.6g} s in {between:.6g} s at step "
                f"{self.step[at]:.0f}"
            )
        if self.own:
            yield from self._find_left_in_steps()
            yield from self._find_overlaps()
        yield from self._find_left_between()
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

    def _find_left_in_steps(self) -> Iterator[str]:
        """Phases and wait fill a step on a CPU, and do not exceed it on any device."""
        filled = self.phases + (self.wait if self.exact else 0)
        over = np.flatnonzero(filled > self.took * (1 if self.exact else 1.001) + EXACT_S)
        if len(over):
            at = over[0]
            text = f"the phases of step {self.step[at]:.0f} and its wait last {filled[at]:.6g} s"
            yield f"{text}, the step {self.took[at]:.6g} s (so at {len(over)} of {len(filled)} rows)"
        if not self.exact and np.nansum(self.wait) > 1.05 * np.nansum(self.took) + 1.0:
            yield (
                f"waits for data of {np.nansum(self.wait):.3g} s in steps of "
                f"{np.nansum(self.took):.3g} s"
            )
        # bookkeeping behind the step before is in `own_s`, and ends before a pause
        plain = self.follows & (self.gap <= self.slack) & np.isfinite(self.bookkeeping)
        plain[0] = False
        if not (self.ours and plain.any()):
            return
        left = (self.took - filled - self.bookkeeping)[plain]
        took = self.took[plain]
        middle = float(np.median(left))
        usual = float(np.median(took))
        allowed = LEFT_IN_STEPS.beside(usual) + self.to_others * usual
        if middle < -allowed or (middle > allowed and len(left) >= FEWEST_STEPS):
            yield (
                f"phases, wait and bookkeeping leave {middle:.3g} s of a step of "
                f"{np.median(took):.3g} s"
            )
        if left.sum() > LEFT_IN_ALL.beside(took.sum()) + self.to_others * took.sum():
            yield (
                f"phases, wait and bookkeeping leave {left.sum():.3g} s of steps of "
                f"{took.sum():.3g} s"
            )
        for at in np.flatnonzero(left > LEFT_IN_A_STEP.beside(took))[:1]:
            step = self.step[plain][at]
            yield f"phases, wait and bookkeeping leave {left[at]:.3g} s of step {step:.0f}"

    def _find_left_between(self) -> Iterator[str]:
        """Time between two steps belongs to a planned event or a pause that is recorded there."""
        inside = self.follows & np.isfinite(self.gap) & (self.gap > self.slack)
        inside[0] = False
        elapsed = float(np.nansum(np.diff(self.ended))) or math.nan
        bare = inside & ~self.known
        # a killed process has not logged its last checkpoint
        cut = math.isnan(self.stopped)
        if bare.sum() > 2 * cut and self.gap[bare].sum() > (0 if self.exact else 0.1 * elapsed):
            yield (
                f"step_s falls short of t_mono_s at {bare.sum()} of {len(self.step)} steps where "
                f"nothing else is recorded: {self.gap[bare].sum():.3g} s of {elapsed:.3g} s, from "
                f"step {self.step[bare][0]:.0f} on"
            )
        unplaced = self.spent.get(-1, 0.0)  # the best and the final weights name no step
        marked = inside & self.known
        stated = self.explained[marked].sum() + unplaced
        left = self.gap[marked].sum() - stated
        share = LEFT_BETWEEN.share if self.exact else 1.0
        allowed = LEFT_BETWEEN.seconds * marked.sum() + share * stated
        if left > max(allowed, 0.0 if self.exact else 0.05 * elapsed):
            yield (
                f"{self.gap[marked].sum():.3g} s between steps are explained by {stated:.3g} s of "
                "validation, checkpoints and pauses"
            )
        if not self.ours:
            return
        ends = (
            ("before the first step", self.gap[0] - self.waited, self.explained[0]),
            (
                "after the last step",
                self.stopped - self.ended[-1],
                self.spent.get(int(self.step[-1]) + 1, 0.0) + unplaced,
            ),
        )
        for where, took, stated in ends:
            if took - stated > LEFT_AT_ENDS.beside(stated) * self.stretch:
                yield f"{took:.3g} s {where} are explained by {stated:.3g} s"

    def _find_overlaps(self) -> Iterator[str]:
        """An event takes its time between the steps that it is between; the run's start lies before
        its first step, and its stop behind its last one.
        """
        slack = float(np.nanmax(self.slack, initial=EXACT_S))
        starts = self.ended - self.took
        for event in self.events:
            kind = event["event"]
            time = event["t_mono_s"]
            if time is None or (kind == "checkpoint" and self.overlaps):
                continue
            if kind in ("validation", "source_validation", "translation", "checkpoint"):
                begun = time - (event["duration_s"] or 0.0)
                after = int(np.searchsorted(self.ended, begun + slack))
                wrong = after < len(starts) and starts[after] < time - slack
                wrong |= begun < self.begun - slack
                place = _find_step(event)
                if place is not None and place >= 0:
                    number = self.step[after] if after < len(starts) else self.step[-1] + 1
                    wrong |= number != place
            else:
                wrong = kind in STARTS and (starts < time - slack).any()
                wrong |= kind == "run_stop" and (self.ended > time + slack).any()
            if wrong:
                yield (
                    f"{kind} (step {event['step']}) was logged at a time when the steps beside "
                    "it ran"
                )
                return
