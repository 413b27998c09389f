"""The jobs of a Snakemake call, planned or failed, as the workflow records them
(`internals.JobEvents`).
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenscale.cli.snakemake.internals import REASONS
from tokenscale.runs.records.provenance import read_lines

#: kind → (plural, pattern of its output with its experiment and name), in the order of the data
#: flow
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
    "description": ("descriptions", r"results/figures/(?P<of>[^/]+)/description\.json"),
    "figure": ("figures", r"results/figures/(?P<of>[^/]+)/(?P<name>[^/.]+).*"),
    "report": ("report", r"results/report[^/]*/(?P<name>.*)"),
    "job": ("jobs", r".*"),
}
#: kinds of jobs that build data for the runs; each has its source files as the input `code`
DATA = ("download", "corpus", "records", "tokenizer", "store", "mixture")
_REASON = re.compile(f"({'|'.join(map(re.escape, REASONS))})")


@dataclass(frozen=True)
class Job:
    """A planned or failed job. `reasons`: name → text. `message`: the rule's or, of a failed job,
    the executor's.
    """

    rule: str
    outputs: tuple[str, ...]
    logs: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    message: str = ""
    slurm: str | None = None

    @cached_property
    def _found(self) -> tuple[str, dict[str, str]]:
        matches = (
            (k, re.fullmatch(pattern, o)) for o in self.outputs for k, (_, pattern) in KINDS.items()
        )
        return next(((kind, found.groupdict()) for kind, found in matches if found), ("job", {}))

    @property
    def kind(self) -> str:
        """Return the kind of the job's output (see KINDS); `job` for an output elsewhere."""
        return self._found[0]

    @property
    def experiment(self) -> str | None:
        return self._found[1].get("of")

    @property
    def name(self) -> str:
        """Return the job's name within its kind."""
        return (
            " of ".join(filter(None, [self._found[1].get("name"), self.experiment]))
            or self.message
            or self.rule
        )


def list_planned_jobs(events: Iterable[dict[str, Any]]) -> list[Job]:
    """Return the jobs that start, each with its reasons. Targets, which write nothing, are left
    out.
    """
    return [_job(event) for event in events if event["event"] == "job_info" and event["output"]]


def read_failed_jobs(file: Path) -> list[Job]:
    """Return the jobs whose last attempt failed. A line that a killed process left incomplete is
    skipped.
    """
    failed: dict[int, Job] = {}
    for line in read_lines(file):
        with suppress(ValueError):
            event = json.loads(line)
            failed.pop(event["jobid"], None)
            if event["event"] == "job_error":
                failed[event["jobid"]] = _job(event)
    return list(failed.values())


def _job(event: dict[str, Any]) -> Job:
    # sbatch's call repeats the job's command, which may contain any word
    message = event["message"].partition("    sbatch call:")[0].strip()
    reasons = split_reasons(event["reason"])
    return Job(
        rule=event["rule"],
        outputs=tuple(event["output"]),
        logs=tuple(event["log"]),
        reasons=reasons,
        message=message,
        slurm=event["slurm"],
    )


def split_reasons(text: str) -> dict[str, str]:
    """Split Snakemake's line into its reasons; unknown text is kept whole, as `other`.

    >>> split_reasons("Missing output files: a, b; Code has changed since last execution")
    {'missing': 'a, b', 'rule': ''}
    """
    _, *parts = _REASON.split(text)
    found = {
        REASONS[name]: rest.strip(" ;") for name, rest in zip(parts[::2], parts[1::2], strict=True)
    }
    return found or {"other": text.strip()}
