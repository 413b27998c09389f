"""The executor of this workflow on SLURM: the plugin's, with our own query of states.

The plugin waits for ever for a job that was cancelled or preempted, forgets all jobs once the
accounting is silent, and gives a job up where the controller did not answer `sbatch`.
evidence/slurm-plugin lists these defects with the releases that have them. Whatever is not here is
the plugin's.
"""

import asyncio
import logging
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from snakemake_executor_plugin_slurm import Executor
from snakemake_executor_plugin_slurm.utils import get_job_wildcards
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.shared_job import Job, SharedJob, count_places

if TYPE_CHECKING:
    from tokenscale.cli.snakemake.internals import Workflow

#: seconds to wait for an answer of SLURM
ANSWER_S = 60.0
#: longest pause between two questions, in seconds: squeue forgets a job after MinJobAge, 300
LONGEST_PAUSE_S = 180.0
#: how much a pause between two queries of states grows by
LONGER_BY_S = 10.0
#: first pause before a submission is repeated; it doubles from then on
FIRST_RETRY_S = 5.0
#: a job that SLURM does not know for so long, or that it does not resume, has failed
LOST_AFTER_S = 600.0

#: a job that may share a node waits at most so long for others
SHARED_AFTER_S = 600.0

#: states of jobs that have ended without success, by the first word that SLURM prints
FAILED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    )
)
#: of these, states after which SLURM starts a job again that may be requeued
RESUMED = frozenset(("NODE_FAIL", "PREEMPTED"))
#: states of a node that starts no job
DOWN = "DOWN,DRAIN,FAIL,NO_RESPOND"
#: what `sbatch` prints where the controller is away or overloaded (SLURM's slurm_errno.c): the
#: same call may succeed later
TRANSIENT = (
    "Unable to contact slurm controller",
    "Slurm controller is not responding",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "backup controller",
    "standby mode",
    "Communication connection failure",
    "Communication shutdown failure",
    "Message receive failure",
    "Message send failure",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Transport endpoint",
    "temporarily unable",
    "temporarily unavailable",
    "persistent connection",
    "Unable to connect to database",
)
#: how the plugin's message of a refused submission begins
REFUSED = "SLURM sbatch failed."
#: what `sacct` prints on a cluster without accounting
NO_ACCOUNTING = "accounting storage is disabled"


def install_executor() -> None:
    """Make this process submit jobs to SLURM by the executor below. Other calls of Snakemake in
    this environment keep the plugin's.
    """
    ExecutorPluginRegistry().get_plugin("slurm").executor = CampaignExecutor


@dataclass(frozen=True)
class Answer:
    """SLURM's answer on the states of jobs. If `is_complete`, SLURM does not know the jobs that
    have no state in it.
    """

    states: dict[str, str]
    is_complete: bool
    problem: str = ""


def ask(*argv: str) -> tuple[int | None, str]:
    """Run a client of SLURM. Returns its exit code and its output, both streams.

    The code is None for a command that is missing or that gives no answer in time.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return None, f"{argv[0]} gave no answer within {ANSWER_S:g} s"
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout.strip()


def read_states(text: str) -> dict[str, str]:
    """Return job → state of lines such as `4711|CANCELLED by 1000`.

    >>> read_states("7|CANCELLED by 1000\\n8|COMPLETED")
    {'7': 'CANCELLED by 1000', '8': 'COMPLETED'}
    """
    lines = (line.partition("|") for line in text.splitlines())
    return {job.strip(): state.strip() for job, bar, state in lines if bar and job.strip()}


def first_word(state: str) -> str:
    """Return the state without what follows it.

    >>> first_word("CANCELLED by 1000"), first_word("CANCELLED+")
    ('CANCELLED', 'CANCELLED')
    """
    return next(iter(state.split()), "").rstrip("+")


def query_states(jobs: Iterable[str], name: str, has_accounting: bool = True) -> Answer:
    """Ask for the states of jobs by their ids: the accounting, and the controller about the rest.

    `name` is what all of them are called.
    """
    wanted = list(jobs)
    code: int | None = 1
    text = NO_ACCOUNTING
    if has_accounting:
        code, text = ask(
            "sacct",
            "-X",
            "--parsable2",
            "--noheader",
            "--format=JobIdRaw,State%32",
            "--jobs",
            ",".join(wanted),
        )
    states = read_states(text) if code == 0 else {}
    problem = "" if code == 0 else text
    if all(job in states for job in wanted):
        return Answer(states, is_complete=True)
    controller, queue = ask(
        "squeue", "--noheader", "--states=all", "--format=%i|%T", f"--name={name}"
    )
    if controller == 0:
        states = read_states(queue) | states
        if NO_ACCOUNTING in problem:
            problem = ""
    return Answer(states, is_complete=code == 0 or not problem, problem=problem or queue)


def is_transient(refusal: str) -> bool:
    """Return whether the same submission may succeed later."""
    return any(words.lower() in refusal.lower() for words in TRANSIENT)


def grow_pauses() -> Iterator[float]:
    """Yield pauses in seconds, each twice as long as the one before, up to the longest."""
    pause = FIRST_RETRY_S
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_S)


class CampaignExecutor(Executor):
    """The plugin's executor for campaigns of days, during which SLURM is away at times."""

    def __init__(self, workflow: "Workflow", logger: logging.Logger) -> None:
        self._is_ended = threading.Event()
        self._submitted: set[str] = set()
        self._in_thread = threading.local()
        self._unclear_since: dict[str, float] = {}
        self._silent_since: float | None = None
        self._waiting: dict[Job, float] = {}
        self._waiting_lock = threading.Lock()
        self._given: set[int] = set()
        super().__init__(workflow, logger)  # starts the thread that asks for states

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        internals.check_executor(self)
        if arrays := self.workflow.executor_settings.array_jobs:
            with internals.exit_on_error():
                raise UserError(
                    "jobs of this workflow are no array jobs: the states of their tasks are not "
                    "read.",
                    found=f"slurm-array-jobs: {arrays}",
                    next="remove this line from the profile; `parts_per_job` of the configuration "
                    "puts many parts into one job",
                )

    # -- submission

    def run_jobs(self, jobs: list[Job]) -> None:
        """Submit jobs. Jobs that may share a node are held until they fill one (see
        `_submit_shared`).
        """
        super().run_jobs([job for job in jobs if count_places(job) == 1])
        self._given.update(job.jobid for job in jobs)
        shared = [job for job in jobs if count_places(job) > 1]
        for job in shared:
            self.run_job_pre(job)
        with self._waiting_lock:
            self._waiting.update(dict.fromkeys(shared, time.monotonic()))
        for places in {count_places(job) for job in shared}:
            self._submit_shared(places, in_full=not self._may_come(places))

    def _may_come(self, places: int) -> bool:
        """Return whether this call is to run more jobs of this size that are not ready yet."""
        return any(
            job.jobid not in self._given and count_places(job) == places
            for job in self.workflow.dag.needrun_jobs()
            if not job.is_local
        )

    def _submit_shared(self, places: int, in_full: bool) -> None:
        """Submit waiting jobs of one size, the longest first: as many as fill nodes, or all."""
        with self._waiting_lock:
            ready = [job for job in self._waiting if count_places(job) == places]
            ready.sort(key=lambda job: job.resources.runtime, reverse=True)
            count = len(ready) if in_full else len(ready) // places * places
            for job in ready[:count]:
                del self._waiting[job]
        for start in range(0, count, places):
            jobs = ready[start : min(start + places, count)]
            one = SharedJob(jobs, Path(self.tmpdir)) if len(jobs) > 1 else jobs[0]
            self._job_submission_executor.submit(self.run_job, one)

    def _submit_what_waits_long(self) -> None:
        """Submit jobs whose company did not come: its data failed, or Snakemake runs few jobs."""
        if self._is_ended.is_set():
            return
        with self._waiting_lock:
            late = time.monotonic() - SHARED_AFTER_S
            places = {count_places(job) for job, since in self._waiting.items() if since < late}
        for number in places:
            self._submit_shared(number, in_full=True)

    def format_job_exec(self, job: Job | SharedJob) -> str:
        if isinstance(job, SharedJob):
            return job.format_command(super().format_job_exec)
        return super().format_job_exec(job)

    def get_account_arg(self, job: Job | SharedJob) -> Iterator[str]:
        """Yield the account as it is given. sbatch itself refuses one that is not the user's; the
        plugin would ask the accounting before each job.
        """
        if account := job.resources.get("slurm_account"):
            yield f" -A {shlex.quote(str(account))}"
        else:
            yield from super().get_account_arg(job)

    def run_job(self, job: Job | SharedJob) -> None:
        """Submit a job, as often as the controller does not answer. A refusal for another reason
        is final: the same call would be refused again.
        """
        remove_old_logs(job)
        refusal = self._submit(job)
        for pause in grow_pauses():
            if not refusal:
                return
            if not is_transient(refusal):
                break
            reason = describe_refusal(refusal)
            self.logger.warning(
                f"SLURM does not take {job.name}: {reason}. Trying again in {pause:g} s."
            )
            if self._is_ended.wait(pause):
                break
            is_answered, lost = self._find_unknown_job(job)
            if lost is not None:
                self._adopt(job, lost)
                return
            if is_answered:
                refusal = self._submit(job)
        for one in job.jobs if isinstance(job, SharedJob) else [job]:
            if refusal.startswith(REFUSED):
                one.attempt = one.restart_times + 1
            super()._report_job_error_threadsafe(SubmittedJobInfo(one), refusal)

    def _submit(self, job: Job | SharedJob) -> str:
        """Return why SLURM did not take a job; "" for one that it took."""
        self._in_thread.refusal = ""
        super().run_job(job)
        return self._in_thread.refusal

    def _report_job_error_threadsafe(self, job_info: SubmittedJobInfo, msg: str) -> None:
        """Keep the plugin's message for `run_job`, which decides what follows."""
        self._in_thread.refusal = msg

    def _report_job_submission_threadsafe(self, job_info: SubmittedJobInfo) -> None:
        self._submitted.add(job_info.external_jobid)
        shared = job_info.job
        marks = shared.marks if isinstance(shared, SharedJob) else {shared: None}
        for job, mark in marks.items():
            aux = job_info.aux | {"mark": mark}
            super()._report_job_submission_threadsafe(replace(job_info, job=job, aux=aux))

    def _find_unknown_job(self, job: Job | SharedJob) -> tuple[bool, str | None]:
        """Return whether the controller answers, and the job that it took without an answer that
        reached us. The comment tells jobs of one call apart.
        """
        code, text = ask(
            "squeue", "--noheader", "--states=all", "--format=%i|%k", f"--name={self.run_uuid}"
        )
        comments = read_states(text)
        wildcards = get_job_wildcards(job)
        comment = f"rule_{job.name}" + (f"_wildcards_{wildcards}" if wildcards else "")
        unknown = [
            found
            for found, its_comment in comments.items()
            if its_comment == comment and found not in self._submitted
        ]
        return code == 0, unknown[-1] if code == 0 and unknown else None

    def _adopt(self, job: Job | SharedJob, external: str) -> None:
        """Go on with a job that SLURM has taken."""
        self.logger.warning(f"SLURM has taken {job.name} as job {external}.")
        log = self.slurm_logdir / f"rule_{job.name}" / get_job_wildcards(job) / f"{external}.log"
        self._report_job_submission_threadsafe(
            SubmittedJobInfo(job, external_jobid=external, aux={"slurm_logfile": log})
        )

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel jobs, and end the pauses of submissions."""
        self._is_ended.set()
        super().cancel_jobs(active_jobs)

    def shutdown(self) -> None:
        """End the pauses of submissions before their threads are waited for."""
        self._is_ended.set()
        super().shutdown()

    # -- states

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs that have ended, and yield all others. While SLURM is silent, that is
        every job.
        """
        settings = self.workflow.executor_settings
        first_pause = settings.init_seconds_before_status_checks
        self._submit_what_waits_long()
        if not active_jobs:
            self.next_seconds_between_status_checks = first_pause
            return
        async with self.status_rate_limiter:
            answer = await asyncio.to_thread(
                query_states,
                {info.external_jobid for info in active_jobs},
                name=self.run_uuid,
                has_accounting=self.get_status_command() == "sacct",
            )
        self._note_silence(answer)
        has_any_ended = False
        for info in active_jobs:
            state = answer.states.get(info.external_jobid, "")
            has_failed = self._has_failed(info, state, answer.is_complete)
            mark = info.aux["mark"]
            if first_word(state) == "COMPLETED" or (has_failed and mark and mark.exists()):
                self._report_success(info)
            elif has_failed:
                await asyncio.to_thread(self._exclude_nodes_that_are_down, info, state)
                self._report_failure(info, state)
            else:
                yield info
                continue
            has_any_ended = True
        longer = self.next_seconds_between_status_checks + LONGER_BY_S
        self.next_seconds_between_status_checks = (
            first_pause if has_any_ended else min(longer, LONGEST_PAUSE_S)
        )

    def _note_silence(self, answer: Answer) -> None:
        """Say once that SLURM is silent, and once that it answers again."""
        if answer.is_complete and self._silent_since is not None:
            minutes = (time.monotonic() - self._silent_since) / 60
            self.logger.warning(f"SLURM answers again, after {minutes:.1f} minutes.")
            self._silent_since = None
        elif not answer.is_complete and self._silent_since is None:
            self._silent_since = time.monotonic()
            reason = answer.problem.splitlines()[0] if answer.problem else "no answer"
            self.logger.warning(f"SLURM does not tell the states of jobs: {reason}. Still asking.")

    def _has_failed(self, info: SubmittedJobInfo, state: str, is_complete: bool) -> bool:
        """Return whether a job has ended without success. One that SLURM does not know, or that it
        is to resume, has failed once that lasts too long.
        """
        word = first_word(state)
        is_resumed = word in RESUMED and self.workflow.executor_settings.requeue
        if word in FAILED and not is_resumed:
            return True
        if not is_complete:
            return False
        if word and not is_resumed:
            self._unclear_since.pop(info.external_jobid, None)
            return False
        since = self._unclear_since.setdefault(info.external_jobid, time.monotonic())
        return time.monotonic() - since > LOST_AFTER_S

    def _report_success(self, info: SubmittedJobInfo) -> None:
        self.report_job_success(info)
        if not self.workflow.executor_settings.keep_successful_logs:
            Path(info.aux["slurm_logfile"]).unlink(missing_ok=True)

    def _report_failure(self, info: SubmittedJobInfo, state: str) -> None:
        status = state or f"unknown for {LOST_AFTER_S / 60:g} minutes"
        message = f"SLURM-job '{info.external_jobid}' failed, SLURM status is: '{status}'. "
        self.report_job_error(info, msg=message, aux_logs=[str(info.aux["slurm_logfile"])])

    def _exclude_nodes_that_are_down(self, info: SubmittedJobInfo, state: str) -> None:
        """Exclude from later submissions those nodes of a lost job that are down; its others are
        sound.
        """
        if first_word(state) != "NODE_FAIL":
            return
        code, nodes = ask(
            "sacct",
            "-X",
            "--noheader",
            "--parsable2",
            "--format=NodeList",
            "-j",
            info.external_jobid,
        )
        if code != 0 or not nodes:
            return
        code, down = ask(
            "sinfo", "--noheader", "--Node", f"--nodes={nodes}", f"--states={DOWN}", "--format=%N"
        )
        if code == 0:
            self._failed_nodes.update(down.split())


def remove_old_logs(job: Job | SharedJob) -> None:
    """Remove a job's logs of an earlier run, which would be shown for one that dies before it
    writes.
    """
    for log in job.log:
        Path(log).unlink(missing_ok=True)


def describe_refusal(refusal: str) -> str:
    """Return SLURM's words in the plugin's message.

    >>> describe_refusal("SLURM sbatch failed. The error message was 'sbatch: error: no'.\\n  call")
    'no'
    """
    words = refusal.partition("The error message was '")[2] or refusal
    return words.splitlines()[0].rstrip("'.").removeprefix("sbatch: error: ")
