"""Progress of one Snakemake call, for the logger plugin: numbered jobs, their durations, and the
time left.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.base.wording import format_duration
from tokenscale.cli.snakemake.internals import RECORDS

#: no job is this short: `snakemake --touch` writes records of jobs that did not run
SHORTEST_S = 0.1

#: start and end of a job, in seconds
Interval = tuple[float, float]


@dataclass(frozen=True)
class Job:
    """A job of this call: its number among all jobs, its rule, and a label of the rule and what it
    is for.
    """

    number: int
    rule: str
    label: str
    started_s: float


@dataclass(frozen=True)
class Estimate:
    """Seconds that the jobs of known rules still take, how many those are, and how many jobs have
    no estimate.
    """

    seconds: float
    known: int
    without: int

    def render(self) -> str:
        """Return the estimate as text with rounded times; no time where most jobs have none.

        >>> Estimate(251, 9, 0).render(), Estimate(43, 9, 3).render(), Estimate(43, 3, 9).render()
        ('about 4 min left', 'about 45 s left, 3 jobs not estimated', '9 jobs not estimated')
        >>> Estimate(0, 0, 1).render(), Estimate(0, 0, 0).render()
        ('1 job not estimated', 'nearly done')
        """
        parts = []
        if self.seconds > 0 and self.known >= self.without:
            parts.append(f"about {format_duration(_round_time(self.seconds))} left")
        if self.without > 0:
            parts += [f"{self.without} job{'s' * (self.without > 1)} not estimated"]
        return ", ".join(parts) or "nearly done"


class Progress:
    """The jobs of a call, planned by rule, running and finished, and the lines of the display.
    `started_s`: its start.

    A rule's next job is estimated by the wall-clock time per job of the rule's earlier jobs. Jobs
    that ran side by side share their time, so the number of cores is accounted for; timed jobs,
    which run one at a time, share none. Jobs of this call count one each. All jobs recorded earlier
    count as one together, since the settings may have changed.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        recorded: Mapping[str, Sequence[Interval]] | None = None,
        started_s: float = 0.0,
    ):
        self.planned = Counter(counts)
        self.started_s = started_s
        self.recorded = {
            rule: wall_clock_per_job(jobs) for rule, jobs in (recorded or {}).items() if jobs
        }
        self.running: dict[int, Job] = {}
        self.finished: dict[str, list[Interval]] = defaultdict(list)
        self.failed = 0
        self.last_s: float | None = None
        self._jobs: dict[int, Job] = {}
        self._started: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.planned.total()

    @property
    def done(self) -> int:
        return sum(map(len, self.finished.values()))

    def start(self, job_id: int, rule: str, label: str, now: float) -> Job:
        """Record that a job starts. A job that starts again keeps its number."""
        earlier = self._jobs.get(job_id)
        number = earlier.number if earlier else len(self._jobs) + 1
        if earlier is None:
            self._started[rule] += 1
            self.planned[rule] = max(self.planned[rule], self._started[rule])
        self.running[job_id] = self._jobs[job_id] = Job(
            number=number,
            rule=rule,
            label=label,
            started_s=now,
        )
        return self._jobs[job_id]

    def finish(self, job_id: int, now: float) -> tuple[Job, float] | None:
        """Record that a job has finished; return it and its seconds, or None for a job that never
        started.
        """
        job = self.running.pop(job_id, None)
        if job is None:
            return None
        self.finished[job.rule].append((job.started_s, now))
        self.last_s = now - job.started_s
        return job, self.last_s

    def fail(self, job_id: int) -> None:
        """Record that a job has failed. It may start again."""
        self.failed += self.running.pop(job_id, None) is not None

    def time_left(self, now: float) -> Estimate:
        """Estimate the rest of the call from the rules that have evidence."""
        seconds = 0.0
        known = 0
        without = 0
        for rule, count in self.planned.items():
            running = [job for job in self.running.values() if job.rule == rule]
            each = self.seconds_per_job(rule)
            waiting = max(0, count - len(self.finished.get(rule, [])) - len(running))
            if each is None:
                without += waiting + len(running)
            else:
                known += waiting + len(running)
                seconds += each * waiting
                seconds += sum(
                    max(0.0, each - (now - job.started_s) / len(running)) for job in running
                )
        return Estimate(seconds, known, without=without)

    def seconds_per_job(self, rule: str) -> float | None:
        """Estimate the wall-clock seconds of the rule's next job; None without an earlier job of
        the rule.
        """
        own = self.finished.get(rule, [])
        earlier = [self.recorded[rule]] if rule in self.recorded else []
        jobs = len(own) + len(earlier)
        return (sum(earlier) + wall_clock_per_job(own) * len(own)) / jobs if jobs else None

    def format_start(self, job: Job, now: float) -> str:
        """Return the log-file line of a job that starts: its label, the previous job's duration,
        and the time left.
        """
        took = "" if self.last_s is None else f"last job {format_duration(self.last_s)}, "
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        return f"{clock}  {self._number(job)}  {job.label}  ({took}{self.time_left(now).render()})"

    def format_finish(self, job: Job, seconds: float) -> str:
        """Return the terminal line of a finished job: its label and its duration."""
        return f"{self._number(job)}  {job.label}  {format_duration(seconds)}"

    def format_status(self, now: float, columns: int) -> str:
        """Return the terminal's status line: longest-running job, number of others, time left.
        Never wraps.
        """
        jobs = sorted(self.running.values(), key=lambda job: job.started_s)
        if not jobs:
            return ""
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        end = f" {format_duration(now - jobs[0].started_s)}{more}"
        end += f"  {self.done}/{self.total} done, {self.time_left(now).render()}"
        room = max(1, columns - len("running  ") - len(end) - 1)
        label = jobs[0].label if len(jobs[0].label) <= room else f"{jobs[0].label[: room - 1]}…"
        return f"running  {label}{end}"[: columns - 1]

    def format_end(self, now: float) -> str:
        """Return the last line: how many jobs of how many ran, and the duration; "" for a call
        without jobs.
        """
        if not self._jobs:
            return ""
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.done} of {self.total} jobs done{failed}, in "
            f"{format_duration(now - self.started_s)}"
        )

    def _number(self, job: Job) -> str:
        return f"{job.number:>{len(str(self.total))}}/{self.total}"


def wall_clock_per_job(jobs: Iterable[Interval]) -> float:
    """Return the time during which at least one of the jobs ran, divided by the number of jobs.

    >>> wall_clock_per_job([(0, 10), (0, 10), (10, 20), (10, 20)])
    5.0
    """
    ordered = sorted(jobs)
    total = 0.0
    reached = float("-inf")
    for start, end in ordered:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / len(ordered) if ordered else 0.0


def read_recorded_jobs(records: Path = RECORDS) -> dict[str, list[Interval]]:
    """Return rule → (start, end) of each job that Snakemake recorded in this folder; unreadable
    records are skipped.
    """
    jobs: dict[tuple, Interval] = {}
    for path in records.rglob("*"):
        try:
            record = read_json(path)
            rule = str(record["rule"])
            start = float(record["starttime"])
            end = float(record["endtime"])
            # a job with several outputs has a record for each
            job = (rule, *map(str, record["log"]))
        except (UserError, ValueError, KeyError, TypeError, OverflowError):
            continue
        if end - start >= SHORTEST_S:
            jobs[job] = max(
                (start, end), jobs.get(job, (start, end)), key=lambda interval: interval[1]
            )
    found: dict[str, list[Interval]] = defaultdict(list)
    for (rule, *_), interval in jobs.items():
        found[rule].append(interval)
    return {rule: sorted(intervals) for rule, intervals in found.items()}


def _round_time(seconds: float) -> float:
    """Round to 5 seconds below a minute, to half a minute below five minutes, then to minutes."""
    if seconds < 57.5:
        step = 5
    elif seconds < 285:
        step = 30
    else:
        step = 60
    return max(5, step * round(seconds / step))
