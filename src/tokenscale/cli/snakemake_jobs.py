"""The jobs of a Snakemake call, planned or failed, as the workflow records them (`snakemake_internals.JobEvents`)."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake_internals import EVENTS_FILE
from tokenscale.runs.records.provenance import read_lines
from tokenscale.settings.profile import NO_OPTIONS, Call

#: kind → (plural, pattern of its output with its experiment and name), in the order of the data flow
KINDS = {
    "download": ("downloads", r"results/downloads/(?P<name>[^/]+)/.*"),
    "corpus": ("corpora", r"results/corpus/(?P<name>[^/]+)/(?!records/).*"),
    "records": ("records", r"results/corpus/(?P<name>[^/]+)/records/.*"),
    "tokenizer": ("tokenizers", r"results/tokenizers/(?P<name>[^/]+)/.*"),
    "store": ("stores", r"results/tokens/(?P<name>.+)/manifest\.json"),
    "mixture": ("mixtures", r"results/mixtures/(?P<name>.+)/manifest\.json"),
    "run": ("runs", r"results/runs/(?P<name>[^/]+)/.*"),
    "benchmark": ("benchmarks", r"results/benchmarks/(?P<name>[^/]+)/(?P<of>[^/]+)\.json"),
    "run table": ("run tables", r"results/experiments/(?P<of>[^/]+)/.*"),
    "tables": ("tables", r"results/tables/(?P<of>[^/]+)(/.*)?"),
    "figure": ("figures", r"results/figures/(?P<of>[^/]+)/(?P<name>[^/.]+).*"),
    "report": ("report", r"results/report[^/]*/(?P<name>.*)"),
    "job": ("jobs", r".*"),
}
#: kinds of jobs that build data for the runs; each has its source files as the input `code`
DATA = ("download", "corpus", "records", "tokenizer", "store", "mixture")
#: beginning of Snakemake's reason → its name here
REASONS = {
    "Missing output files:": "missing",
    "Incomplete output files:": "unfinished",
    "Updated input files:": "updated",
    "Input files updated by another job:": "upstream",
    "Set of input files has changed since last execution": "inputs",
    "Code has changed since last execution": "rule",
    "Params have changed since last execution:": "settings",
    "Software environment definition has changed since last execution": "software",
    "Forced execution": "forced",
}
_REASON = re.compile(f"({'|'.join(map(re.escape, REASONS))})")


@dataclass(frozen=True)
class Job:
    """A planned or failed job. `reasons`: name → text. `message`: the rule's or, of a failed job, the executor's."""

    rule: str
    outputs: tuple[str, ...]
    logs: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    message: str = ""
    slurm: str | None = None

    @cached_property
    def _found(self) -> tuple[str, dict[str, str]]:
        matches = ((k, re.fullmatch(pattern, o)) for o in self.outputs for k, (_, pattern) in KINDS.items())
        return next(((kind, found.groupdict()) for kind, found in matches if found), ("job", {}))

    @property
    def kind(self) -> str:
        """Return the kind of the job's output (see KINDS); `job` for an output elsewhere."""
        return self._found[0]

    @property
    def experiment(self) -> str | None:
        """Return the experiment that the job belongs to, if any."""
        return self._found[1].get("of")

    @property
    def name(self) -> str:
        """Return the job's name within its kind."""
        return " of ".join(filter(None, [self._found[1].get("name"), self.experiment])) or self.message or self.rule


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the recorded events; a line that a killed process left incomplete is skipped."""
    events = []
    for line in read_lines(file):
        with suppress(ValueError):
            events.append(json.loads(line))
    return events


def list_planned_jobs(events: Iterable[dict[str, Any]]) -> list[Job]:
    """Return the jobs that start, each with its reasons. Targets, which write nothing, are left out."""
    return [_job(event) for event in events if event["event"] == "job_info" and event["output"]]


def read_failed_jobs(file: Path) -> list[Job]:
    """Return the jobs whose last attempt failed."""
    failed: dict[int, Job] = {}
    for event in read_events(file):
        failed.pop(event["jobid"], None)
        if event["event"] == "job_error":
            failed[event["jobid"]] = _job(event)
    return list(failed.values())


def _job(event: dict[str, Any]) -> Job:
    # sbatch's call repeats the job's command, which may contain any word
    message = event["message"].partition("    sbatch call:")[0].strip()
    reasons = split_reasons(event["reason"])
    return Job(event["rule"], tuple(event["output"]), tuple(event["log"]), reasons, message, event["slurm"])


def split_reasons(text: str) -> dict[str, str]:
    """Split Snakemake's line into its reasons; unknown text is kept whole, as `other`.

    >>> split_reasons("Missing output files: a, b; Code has changed since last execution")
    {'missing': 'a, b', 'rule': ''}
    """
    _, *parts = _REASON.split(text)
    found = {REASONS[name]: rest.strip(" ;") for name, rest in zip(parts[::2], parts[1::2], strict=True)}
    return found or {"other": text.strip()}


def plan_jobs(targets: list[str], call: Call = NO_OPTIONS) -> list[Job]:
    """Return the jobs that Snakemake would run for these targets. Raise UserError if it cannot plan them.

    Snakemake does not examine a job downstream of one that runs. If runs are downstream of edited data code, a second
    dry run accepts that edit, so that the runs' own reasons are known, too.
    """
    jobs = dry_run(targets, call)
    if not any(job.kind == "run" and set(job.reasons) == {"upstream"} for job in jobs):
        return jobs
    accepted = sorted({job.rule for job in jobs if job.kind in DATA})
    own = {job.outputs: job.reasons for job in dry_run(targets, call, accepted)}
    return [replace(job, reasons=own.get(job.outputs, {}) | job.reasons) for job in jobs]


def dry_run(targets: list[str], call: Call = NO_OPTIONS, accepted: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of a `snakemake --dry-run`, ignoring edits of the code of `accepted` rules.

    Snakemake runs in a process of its own. Raise UserError in a folder without a workflow, and with Snakemake's message
    if it cannot plan.
    """
    require_workflow()
    # outputs that a killed Snakemake left incomplete would stop the dry run, too
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--rerun-incomplete", *call.arguments]
    command += ["--cores", "1"] * (not call.profile)
    command += ["--consider-ancient", *(f"{rule}=code" for rule in accepted)] if accepted else []
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        done = subprocess.run([*command, "--", *targets], env=os.environ | {EVENTS_FILE: str(file)}, **options)
        if not done.returncode:
            return list_planned_jobs(read_events(file))
        for event in read_events(file):
            if event["event"] == "refused":  # a mistake in the configuration
                raise UserError(event["what"], **event["facts"])
    printed = "\n".join((done.stdout.partition("Building DAG of jobs...")[2] or done.stdout).strip().splitlines()[-12:])
    following = f"{snakemake_command(call)} --dry-run {' '.join(targets)}".rstrip()
    raise UserError("Snakemake cannot plan the jobs.", snakemake=printed, next=following)


def require_workflow() -> None:
    """Raise UserError if the working folder holds no workflow."""
    if not (file := Path("workflow/Snakefile")).is_file():
        facts = {"folder": Path.cwd(), "expected": file}
        raise UserError("this folder holds no workflow.", **facts, next="cd to the project's folder")


def snakemake_command(call: Call) -> str:
    """Return the Snakemake command line for this configuration; targets may be appended."""
    return shlex.join(["snakemake", *call.arguments])
