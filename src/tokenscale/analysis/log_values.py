"""Do the values in a run's logs agree with each other, with its clocks, and with what a machine can do?

Everything here is arithmetic on what a log states twice. On a CPU `step_s` is the difference of two readings of the
clock that `t_mono_s` is read from (`train/phase_timer.py`), so that both agree to the nanosecond. On a GPU events are
timed by the device and `t_mono_s` by the host, and another program's log may be as inexact as it likes: there a share
of the step is allowed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from tokenscale.analysis.expectations import Steps

Row = dict[str, Any]

#: fields of a step that cannot be below zero
NEVER_NEGATIVE = (
    *("step", "data_wait_s", "own_s", "h2d_s", "forward_s", "backward_s", "bubble_s", "exposed_communication_s"),
    *("optimizer_s", "loss_sum", "useful_tokens", "total_tokens", "rows", "micro_steps", "learning_rate", "grad_norm"),
    *("grad_norm_clipped", "memory_peak_bytes", "loss_scale"),
)
#: seconds of a step, and nats a token, that no training has
LEAST_S, MOST_S, MOST_NATS = 1e-7, 1e7, 1e5
#: phases of a step that do not overlap (`PhaseTimer`'s laps)
PHASES = ("h2d_s", "forward_s", "backward_s", "bubble_s", "exposed_communication_s", "optimizer_s")
#: seconds that two readings of one clock may differ by, and what other clocks may: seconds, and a share of the step
EXACT_S, LOOSE_S, LOOSE_SHARE = 1e-5, 0.01, 0.01
#: seconds by which wall clocks of one machine may differ
CLOCK_S = 60.0
#: number format → FLOP/s that no core exceeds. fp32: two AVX-512 FMA units are 64 FLOP a cycle (Intel Optimization
#: Reference Manual, 248966), 0.4 TFLOP/s at 6 GHz. Others: an AMX tile unit is 2,048 bf16 FLOP a cycle (the same,
#: chapter 20), 12 TFLOP/s at 6 GHz. Twice that is out of reach of every core.
CORE_FLOPS = {"fp32": 0.8e12}
ANY_CORE_FLOPS = 25e12
#: events with a duration that lie between two steps
BETWEEN = ("validation", "checkpoint", "translation")


def find_faults(run: Row, raw: "Steps", steps: "Steps", events: list[Row], spans: pa.Table) -> list[str]:
    """Return values that cannot be true, in words; a run with any is invalid.

    `raw` are the step rows of all merged attempts by attempt and rank in the order of the files, `steps` the merged
    ones, `spans` the rows of the table of that name.
    """
    if not len(raw):
        return []
    found = _find_negative(raw) + _find_impossible(raw, steps, events)
    found += _find_excess_phases(run, raw)
    found += _find_impossible_speed(run, steps, events)
    found += [] if run.get("external") else _find_validation_sizes(events)
    by_log: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for event in events:
        by_log[event["attempt"], event["rank"]].append(event)
    marks = _find_marks(events)
    pauses = _find_pauses(spans)
    for attempt, rank, rows in _split_logs(raw):
        log = _RankLog(run, raw, rows, by_log[attempt, rank])
        found += [
            f"{text} (attempt {attempt}, rank {rank})"
            for text in log.find_faults(marks[attempt], pauses[attempt, rank])
        ]
    return found


class _RankLog:
    """Clocks of one rank in one attempt."""

    def __init__(self, run: Row, raw: "Steps", rows: slice, events: list[Row]):
        self.exact = run.get("device_kind") == "cpu" and not run.get("external")
        self.own = not run.get("external")
        self.step, self.ended, self.took = (raw[name][rows] for name in ("step", "t_mono_s", "step_s"))
        self.offset = raw["t_unix_s"][rows] - self.ended
        self.events = events
        self.slack = np.full(len(self.step), EXACT_S) if self.exact else LOOSE_S + LOOSE_SHARE * np.abs(self.took)
        begun = self._time("init_done", first=True)
        self.before = np.concatenate([[begun], self.ended[:-1]])
        self.gap = self.ended - self.before - self.took
        #: rows whose predecessor is the step before; of the first row the end of the set-up
        self.follows = np.concatenate([[math.isfinite(begun)], np.diff(self.step) == 1])

    def find_faults(self, marks: dict[int, float], pauses: list[tuple[float, float]]) -> list[str]:
        """`marks`: step → recorded seconds before it; `pauses`: (begin, seconds) of spans."""
        found = self._find_long_steps() + self._find_unrecorded(marks, pauses)
        found += self._find_misplaced_events() + self._find_clock_change()
        return found

    def _time(self, name: str, first: bool) -> float:
        times = [e["t_mono_s"] for e in self.events if e["event"] == name and e["t_mono_s"] is not None]
        return math.nan if not times else times[0] if first else times[-1]

    def _find_long_steps(self) -> list[str]:
        wrong = np.flatnonzero(self.follows & (self.gap < -self.slack))
        if not len(wrong):
            return []
        at = wrong[0]
        between = self.ended[at] - self.before[at]
        return [
            f"step_s exceeds the time that t_mono_s leaves for it at {len(wrong)} of {len(self.step)} steps: "
            f"{self.took[at]:.6g} s in {between:.6g} s at step {self.step[at]:.0f}"
        ]

    def _find_unrecorded(self, marks: dict[int, float], pauses: list[tuple[float, float]]) -> list[str]:
        """Time between two steps belongs to a validation, a checkpoint or a span that is recorded there."""
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
        cut = math.isnan(self._time("run_stop", first=False))  # a killed process has not logged its last checkpoint
        allowed = 0 if self.exact else 0.1 * elapsed
        found = []
        if bare.sum() > 2 * cut and gaps[bare].sum() > allowed:
            found.append(
                f"step_s falls short of t_mono_s at {bare.sum()} of {len(self.step)} steps where nothing else is "
                f"recorded: {gaps[bare].sum():.3g} s of {elapsed:.3g} s, from step {self.step[bare][0]:.0f} on"
            )
        stated = recorded[known & inside].sum() + marks.get(-1, 0.0)
        more = gaps[known].sum() - 2 * stated - 0.1 * known.sum()
        if more > max(0.0, 0.05 * elapsed):
            found.append(
                f"{gaps[known].sum():.3g} s between steps are explained by {stated:.3g} s of "
                "validation, checkpoints and pauses"
            )
        return found

    def _find_misplaced_events(self) -> list[str]:
        """A validation lies between the steps that it is between; the end of the run lies behind its last step."""
        slack = EXACT_S if self.exact else LOOSE_S + LOOSE_SHARE * float(np.nanmax(self.took, initial=0.0))
        for event in self.events:
            time, step = event["t_mono_s"], event["step"]
            if time is None:
                continue
            if event["event"] == "validation" and self.own and step is not None:
                before, after = (np.flatnonzero(self.step == k) for k in (step - 1, step))
                wrong = (self.ended[before] > time + slack).any()
                wrong |= ((self.ended - self.took)[after] < time - slack).any()
            else:
                wrong = event["event"] == "run_stop" and (self.ended > time + slack).any()
            if wrong:
                return [f"{event['event']} (step {step}) was logged at a time when the steps beside it ran"]
        return []

    def _find_clock_change(self) -> list[str]:
        """A log's wall-clock times are its monotonic times plus one constant (`Writer.unix_s`)."""
        pairs = [(e["t_unix_s"], e["t_mono_s"]) for e in self.events]
        offsets = np.concatenate([self.offset, [u - m for u, m in pairs if u is not None and m is not None]])
        offsets = offsets[np.isfinite(offsets)]
        if len(offsets) and np.ptp(offsets) > (1e-3 if self.own else CLOCK_S):
            return [f"the wall clock and the monotonic clock of the log diverge by {np.ptp(offsets):.4g} s"]
        return []


def _split_logs(raw: "Steps") -> Iterator[tuple[int, int, slice]]:
    """(attempt, rank, its rows)."""
    attempt, rank = raw["attempt"], raw["rank"]
    edges = np.flatnonzero((np.diff(attempt) != 0) | (np.diff(rank) != 0)) + 1
    for first, last in zip([0, *edges], [*edges, len(attempt)], strict=True):
        yield int(attempt[first]), int(rank[first]), slice(first, last)


def _find_marks(events: list[Row]) -> dict[int, dict[int, float]]:
    """Attempt → step → seconds of what was recorded before that step, on whichever rank; −1: before an unknown one."""
    marks: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        if event["event"] not in BETWEEN:
            continue
        step = event["step"]
        if event["event"] == "checkpoint":
            named = re.fullmatch(r"step=(\d+)", event["status"] or "")
            step = int(named[1]) if named else -1
        if step is not None:
            of = marks[event["attempt"]]
            of[step] = of.get(step, 0.0) + max(0.0, event["duration_s"] or 0.0)
    return marks


def _find_pauses(spans: pa.Table) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(attempt, rank) → (begin on the monotonic clock, seconds) of its spans."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in spans.select(["attempt", "rank", "start_mono_s", "duration_s"]).to_pylist():
        if row["start_mono_s"] is not None and (row["duration_s"] or 0) > 0:
            found[row["attempt"], row["rank"]].append((row["start_mono_s"], row["duration_s"]))
    return found


def _find_negative(raw: "Steps") -> list[str]:
    found = []
    for name in NEVER_NEGATIVE:
        wrong = np.flatnonzero(raw[name] < (-1e-6 if name.endswith("_s") else 0))
        if len(wrong):
            found.append(f"negative {name} ({raw[name][wrong[0]]:.6g} at step {raw['step'][wrong[0]]:.0f})")
    return found


def _find_impossible(raw: "Steps", steps: "Steps", events: list[Row]) -> list[str]:
    """Values that no training has, and that no rate, loss or share can be computed from."""
    found = []
    if (empty := steps.whole() & (steps.sums("total_tokens") < 1)).any():
        found.append(f"no tokens at step {steps.numbers[empty][0]}")
    most = {name: MOST_S for name in ("step_s", "data_wait_s", *PHASES)} | {
        "loss_sum": MOST_NATS * raw["useful_tokens"]
    }
    found += [f"{name} above any that is possible" for name, limit in most.items() if (raw[name] > limit).any()]
    if ((raw["step_s"] > 0) & (raw["step_s"] < LEAST_S)).any():
        found.append("step_s below any that is possible")
    if (raw["memory_peak_bytes"] < 1).any():
        found.append("memory_peak_bytes of 0")
    for event in (event for event in events if event["event"] == "validation"):
        useful, loss = event["useful_tokens"] or 0, event["loss_sum"]
        if useful < 1 or loss is None or not 0 <= loss <= MOST_NATS * useful:
            found.append(f"validation at step {event['step']} has a loss_sum of {loss} over {useful} useful tokens")
        for name, limit in {"rows": math.inf, "correct_tokens": useful, "duration_s": MOST_S}.items():
            if not 0 <= (event[name] or 0) <= limit:
                found.append(f"validation at step {event['step']} has {name} of {event[name]}")
    return found


def _find_validation_sizes(events: list[Row]) -> list[str]:
    """A run validates on one fixed slice."""
    sizes = {event["useful_tokens"] for event in events if event["event"] == "validation"}
    if len(sizes) < 2:
        return []
    return [f"validated on {' and '.join(map(str, sorted(sizes, key=str)))} useful tokens: the held-out slice is fixed"]


def _find_excess_phases(run: Row, raw: "Steps") -> list[str]:
    """Phases of a step are laps of one timer: together they are no longer than the step.

    On a CPU the wait for the batch is inside the step, too. A GPU's host waits ahead of it, so that only the sums are
    compared.
    """
    took, wait = raw["step_s"], np.nan_to_num(raw["data_wait_s"])
    found = []
    exact = run.get("device_kind") == "cpu" and not run.get("external")
    if not run.get("external"):
        phases = sum((np.nan_to_num(raw[name]) for name in PHASES), np.zeros(len(took)))
        longer = np.flatnonzero(phases + (wait if exact else 0) > took * (1 if exact else 1.001) + EXACT_S)
        if len(longer):
            at = longer[0]
            phases_s = phases[at] + (wait[at] if exact else 0)
            if wait[at] > took[at] + EXACT_S:
                found.append(
                    f"a wait longer than its step ({wait[at]:.6g} s in {took[at]:.6g} s at step {raw['step'][at]:.0f})"
                )
            else:
                found.append(
                    f"the phases of step {raw['step'][at]:.0f} last {phases_s:.6g} s, the step {took[at]:.6g} s "
                    f"(so at {len(longer)} of {len(took)} rows)"
                )
    if not exact and np.nansum(wait) > 1.05 * np.nansum(took) + 1.0:
        found.append(f"waits for data of {np.nansum(wait):.3g} s in steps of {np.nansum(took):.3g} s")
    return found


def _find_impossible_speed(run: Row, steps: "Steps", events: list[Row]) -> list[str]:
    """More FLOPs in a second than the cores of the run's nodes can do. Of GPUs see `compliance._too_good`."""
    flops = run.get("flops_per_token_causal") or run.get("flops_per_token")
    tokens, seconds = steps.totals() if len(steps) else (0.0, 0.0)
    if run.get("device_kind") != "cpu" or not run.get("cores") or not flops or seconds <= 0:
        return []
    nodes = len({e["boot"] for e in events if e["event"] == "run_start"}) or 1
    limit = run["cores"] * nodes * CORE_FLOPS.get(run.get("number_format") or "", ANY_CORE_FLOPS)
    rate = tokens * flops / seconds
    if rate <= limit:
        return []
    return [
        f"{tokens:,.0f} tokens in {seconds:.3g} s are {rate / 1e12:,.3g} TFLOP/s: more than "
        f"{run['cores'] * nodes} cores can do ({limit / 1e12:.3g})"
    ]


def find_doubts(run: Row, steps: "Steps", events: list[Row], record: Row) -> list[str]:
    """Return what somebody should look at: steps that never settle, and clocks that differ. `record` is run.json."""
    return [*_find_clock_differences(run, events, record)]


def _find_clock_differences(run: Row, events: list[Row], record: Row) -> list[str]:
    """Wall clocks: of ranks that share a boot, and of the record against rank 0 of the attempt that wrote it."""
    if run.get("external"):
        return []
    offsets: dict[tuple[int, Any], dict[int, float]] = defaultdict(dict)
    first: dict[str, float] = {}
    for event in events:
        if event["t_unix_s"] is None or event["t_mono_s"] is None:
            continue
        if event["event"] == "run_start" and event["boot"]:
            offsets[event["attempt"], event["boot"]][event["rank"]] = event["t_unix_s"] - event["t_mono_s"]
        if event["attempt"] == record.get("attempt") and event["rank"] == 0:
            first[event["event"]] = event["t_unix_s"]
    found = []
    for (attempt, _), of in offsets.items():
        apart = max(of.values()) - min(of.values())
        if apart > CLOCK_S:
            found.append(f"wall clocks of ranks on one machine are {apart:.4g} s apart in attempt {attempt}")
    started, low, high = record.get("started_unix_s"), first.get("run_start"), first.get("init_done")
    if isinstance(started, (int, float)) and low is not None and high is not None:  # the end may follow a clock change
        apart = max(low - started, started - high)
        if apart > CLOCK_S:
            found.append(
                f"started_unix_s of run.json is {apart:.4g} s {'before' if started < low else 'after'} the log's"
            )
    return found


def find_record_faults(record: Row, run: Row, raw: "Steps") -> list[str]:
    """Return impossible fields of run.json, such as a world size of 0, steps below 0, or the id of another run.

    `run` is the row of the table `runs`, `raw` are the step rows of all merged attempts.
    """
    found = []
    if record.get("run_id", run["run_id"]) != run["run_id"]:
        found.append(f"run.json is of the run {record['run_id']}")
    for path, (least, most) in RECORD_FIELDS.items():
        value = _field(record, path)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not least <= value <= most or (path not in RECORD_FRACTIONS and value != int(value)):
            found.append(f"run.json has {path} {value!r}")
    for path, expected in RECORD_WORDS.items():
        value = _field(record, path)
        if value is not None and not (isinstance(value, str) and re.fullmatch(expected, value)):
            found.append(f"run.json has {path} {value!r}")
    return found or _find_contradictions(record, run, raw)


def _find_contradictions(record: Row, run: Row, raw: "Steps") -> list[str]:
    """Return what run.json says against itself or against its logs."""
    if run.get("external"):
        return []
    found = []
    world, nodes = _field(record, "hardware.world_size"), _field(record, "hardware.nodes")
    if world is not None and world != run.get("world_size"):
        found.append(f"run.json has hardware.world_size {world}, its settings {run.get('world_size')}")
    if nodes is not None and not (isinstance(nodes, list) and len(nodes) <= (run.get("world_size") or 1)):
        found.append(f"run.json has hardware.nodes {nodes!r}")
    flops = [_field(record, f"flops_per_token.{name}") for name in ("causal", "full", "hardware")]
    if None not in flops and flops != sorted(flops):
        found.append(f"run.json has flops_per_token causal, full, hardware {flops}, which must not decrease")
    if len(raw):
        attempt, last = record.get("attempt"), int(raw["attempt"].max())
        if attempt is not None and attempt != last:
            found.append(f"run.json is of attempt {attempt}, the last one that logged steps is {last}")
        steps, taken = _field(record, "outcome.steps"), int(raw["step"].max()) + 1
        if run["status"] == "complete" and steps is not None and steps != taken:
            found.append(f"run.json has outcome.steps {steps}, the logs end with step {taken - 1}")
        energy, elapsed = _field(record, "outcome.energy_j"), float(np.nansum(raw["step_s"]))
        if energy is not None and elapsed > 0 and energy > DEVICE_WATTS * (10 * elapsed + 3600):
            found.append(f"run.json has outcome.energy_j {energy:.4g} for {elapsed:.4g} s of steps of all ranks")
    if run["status"] == "complete" and _field(record, "outcome.stopped_at") is not None:
        found.append("run.json has the status complete, and outcome.stopped_at")
    begins = _field(record, "outcome.begins_at"), _field(record, "outcome.begins_at_useful_tokens")
    if begins[0] == 0 and begins[1]:
        found.append(f"run.json has outcome.begins_at 0, and outcome.begins_at_useful_tokens {begins[1]}")
    return found


def _field(record: Row, path: str) -> Any:
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


#: field of run.json → its least and its largest value
RECORD_FIELDS = {
    "schema": (1, 1),
    "attempt": (0, 1e6),
    "parameters": (1, 1e15),
    "budget_steps": (1, 1e12),
    "micro_steps": (1, 1e9),
    "started_unix_s": (1e9, 1e11),
    "flops_per_token.full": (1, 1e17),
    "flops_per_token.causal": (1, 1e17),
    "flops_per_token.hardware": (1, 1e17),
    "hardware.cores": (1, 1 << 16),
    "hardware.threads_per_rank": (1, 1 << 16),
    "hardware.world_size": (1, 1e7),
    "hardware.memory_bytes": (1 << 26, 1 << 60),
    "hardware.load_average_1min": (0, 1e7),
    "text_lost": (0, 1),
    "text_unknown": (0, 1),
    "launch.share": (1, 1e4),
    "outcome.steps": (0, 1e12),
    "outcome.begins_at": (0, 1e12),
    "outcome.begins_at_useful_tokens": (0, 1e18),
    "outcome.ended_unix_s": (1e9, 1e11),
    "outcome.energy_j": (0, 1e15),
}
#: field of run.json → pattern of its text
RECORD_WORDS = {
    "number_format": "fp32|bf16|fp16|fp8",
    "hardware.device": r"\S.*",
    "hardware.device_kind": "cpu|cuda|mps|xpu|tpu",
    "git.commit": "[0-9a-f]{40}|[0-9a-f]{64}",
    "digest": "[0-9a-f]{64}",
}
#: more than any device takes, the rest of its node included
DEVICE_WATTS = 20_000
#: those that need not be whole numbers
RECORD_FRACTIONS = {
    *("started_unix_s", "outcome.ended_unix_s", "outcome.energy_j", "hardware.load_average_1min"),
    "text_lost",
    "text_unknown",
    *("flops_per_token.full", "flops_per_token.causal", "flops_per_token.hardware"),
}
