"""Describe what a dry run would start, and for which reasons, grouped by their root cause."""

import ast
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.files import read_arguments, read_json
from tokenscale.base.wording import count, format_duration, listing, wrap_text
from tokenscale.cli.snakemake.internals import RECORDS
from tokenscale.cli.snakemake.jobs import DATA, KINDS, Job
from tokenscale.settings.closure import LISTINGS, list_changes
from tokenscale.settings.experiments import flatten_cell
from tokenscale.settings.profile import Call

#: labels of causes, in the order of the output
LABELS = (
    "code",
    "settings",
    "data",
    "rule",
    "inputs",
    "software",
    "unfinished",
    "missing",
    "new",
    "forced",
    "other",
)
#: reasons whose text says nothing more about the cause
FIXED = {
    "rule": "its command in workflow/rules changed",
    "software": "its container or environment changed",
}
FIXED["forced"] = "forced by the command line"


@dataclass(frozen=True)
class Cause:
    """A root cause of reruns: a label of LABELS, a description, and the jobs that run because of
    it.
    """

    label: str
    text: str
    jobs: list[Job]
    dependents: list[Job]


def find_causes(jobs: list[Job]) -> list[Cause]:
    """Return the root causes, each with the jobs it affects directly and those that run only
    because of these.

    A job with several causes is listed under each.
    """
    affected: dict[tuple[str, str], list[int]] = defaultdict(list)
    ran_with = _read_recorded_hashes()
    for number, job in enumerate(jobs):
        for cause in dict.fromkeys(_find_direct_causes(job, ran_with)):
            affected[cause].append(number)
    # files that changed for the same jobs are one cause
    together: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (label, text), numbers in affected.items():
        together[label, tuple(numbers)].append(text)
    makers = {output: number for number, job in enumerate(jobs) for output in job.outputs}
    after: dict[int, set[int]] = defaultdict(set)
    for number, job in enumerate(jobs):
        for file in job.reasons.get("upstream", "").split(", "):
            if file in makers:
                after[makers[file]].add(number)
    found = []
    for (label, direct), texts in together.items():
        reached: set[int] = set()
        todo = list(direct)
        while todo:
            new = after[todo.pop()] - reached
            reached |= new
            todo += new
        dependents = [jobs[n] for n in sorted(reached - set(direct))]
        found.append(
            Cause(
                label=label,
                text=_describe_cause(label, texts=sorted(texts)),
                jobs=[jobs[n] for n in direct],
                dependents=dependents,
            )
        )
    return sorted(
        found, key=lambda c: (LABELS.index(c.label), -len(c.jobs) - len(c.dependents), c.text)
    )


def _read_recorded_hashes() -> dict[tuple[str, str], str]:
    """Return (log of a job, listing of source files) → hash of the listing that Snakemake recorded
    for the job.

    Empty if the records have another format: the changed files are then not named.
    """
    found: dict[tuple[str, str], str] = {}
    for path in RECORDS.rglob("*"):
        try:
            record = read_json(path)
            for file, hashed in record["input_checksums"].items():
                found |= {(log, file): hashed.removeprefix("sha256:") for log in record["log"]}
        except (UserError, KeyError, TypeError, AttributeError):
            continue
    return found


def _find_direct_causes(
    job: Job, ran_with: dict[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of each cause that affects this job directly."""
    log = next(iter(job.logs), "")
    for reason, text in job.reasons.items():
        files = text.split(", ")
        if reason == "updated":
            for file in files:
                if f"{LISTINGS}/" in file:
                    changed = list_changes(Path(file), sha256=ran_with.get((log, file), ""))
                    yield from (("code", name) for name in changed or ["one of its source files"])
                else:
                    yield "data", file
        elif reason == "settings":
            yield "settings", describe_changed_settings(text)
        elif reason == "missing":  # a job that ran before has left its log
            yield ("missing", files[0]) if log and Path(log).exists() else ("new", "not built yet")
        elif reason in ("unfinished", "other"):
            yield reason, files[0] if reason == "unfinished" else text
        elif reason in FIXED:
            yield reason, FIXED[reason]
        # otherwise the other reason names the input
        elif reason == "inputs" and len(job.reasons) == 1:
            yield "inputs", "its set of input files changed"


def _describe_cause(label: str, texts: list[str]) -> str:
    subject = listing(texts if len(texts) <= 3 else [*texts[:2], f"{len(texts) - 2} more files"])
    if label == "missing":
        return f"{subject} (removed, or its job failed)"
    return subject + {"code": " changed", "data": " changed", "unfinished": " was interrupted"}.get(
        label, ""
    )


def describe_changed_settings(text: str) -> str:
    """Rewrite Snakemake's parameter change (`… before: VALUES now: VALUES`) as `key: before → now`.

    JSON is compared key by key; a setting that is not stated has its default.

    >>> describe_changed_settings('''across all output: before: '{"a":{"b":1}}' now: '{"a":{"b":2,"c":true}}' ''')
    'a.b: 1 → 2, a.c: default → true'
    """
    found = re.search(r"before: (.*) now: (.*)", text)
    if not found:
        return text
    (old, *before), (new, *now) = (_parse_values(side) for side in found.groups())
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k)]
    listed = [f"{k}: {_format_value(old.get(k))} → {_format_value(new.get(k))}" for k in changed]
    if before or now:
        listed.append(f"{', '.join(before) or 'nothing'} → {', '.join(now) or 'nothing'}")
    shown = listed if len(listed) <= 4 else [*listed[:3], f"{len(listed) - 3} more"]
    return ", ".join(shown) or "its content, compared by hash"


def _parse_values(text: str) -> list[Any]:
    """Parse one side of a change: a flat mapping of its JSON objects, then its other values as
    text, without hashes.

    Values may lie in files of arguments (`@results/arguments/HASH.json`).
    """
    try:
        values = list(map(str, ast.literal_eval(f"[{text}]")))
    except (SyntaxError, ValueError):
        values = [] if "<nothing exclusive>" in text else [text.strip()]
    with suppress(UserError):  # a file that is gone is a hash, too
        values = [word for word in read_arguments(values) if not word.startswith("--")]
    settings: dict[str, Any] = {}
    other = []
    for value in values:
        inner: Any = value
        with suppress(ValueError):
            inner = json.loads(value)
        if isinstance(inner, dict):
            settings |= flatten_cell(inner)
        elif not re.fullmatch(r"[0-9a-f]{64}|@.*\.json", value):
            other.append(_format_value(inner))
    return [settings, *sorted(other)]


def _format_value(value: object) -> str:
    if value is None:
        text = "default"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def render(jobs: list[Job], targets: list[str], call: Call) -> str:
    """Return how much would run, each cause with its jobs, and the commands that avoid needless
    runs.
    """
    found = find_causes(jobs)
    trainings = [job for job in jobs if job.kind == "run"]
    lines = [_describe_total(jobs), *([_describe_trainings(trainings)] if trainings else [])]
    for cause in found:
        lines += ["", *wrap_text(f"{cause.label:<9} ", text=cause.text, width=118)]
        lines += wrap_text(" " * 12, text=listing(_list_jobs(cause.jobs)), width=118)
        if cause.dependents:
            lines += wrap_text(
                " " * 9 + "-> ", text=listing(_list_jobs(cause.dependents, counted=True)), width=118
            )
    hints = list(
        _suggest_commands(
            jobs,
            found,
            targets=targets,
            call=call,
        )
    )
    return "\n".join([*lines, *([""] if hints else []), *map(as_typed, hints)])


def _describe_total(jobs: list[Job]) -> str:
    counts = Counter(job.kind if job.kind in ("run", "store") else "job" for job in jobs)
    parts = [_count(counts[kind], kind) for kind in ("run", "store") if counts[kind]]
    if counts["job"]:
        parts.append(_count(counts["job"], kind="job").replace(" ", " other " if parts else " "))
    return f"{listing(parts)} would run."


def _describe_trainings(jobs: list[Job]) -> str:
    """Describe how many trainings run on how many ranks, and how long their last runs took."""
    found = [re.search(r"-w(\d+)-[0-9a-f]+$", job.name) for job in jobs]
    sizes = [int(match[1]) if match else 1 for match in found]
    counts = sorted(Counter(sizes).items())
    text = "trainings: " + ", ".join(f"{n} on {count(size, 'rank')}" for size, n in counts)
    seconds = [_read_last_seconds(Path("results/runs") / job.name / "run.json") for job in jobs]
    took = sum(seconds)
    over_ranks = sum(s * size for s, size in zip(seconds, sizes, strict=True))
    if ran := sum(s > 0 for s in seconds):
        text += (
            f"; last time{'' if ran == len(jobs) else f' {ran} of them'} took "
            f"{format_duration(took)}"
        )
        text += f", {format_duration(over_ranks)} over all ranks" if over_ranks > took >= 1 else ""
    return text


def _read_last_seconds(record: Path) -> float:
    """Return how long a run took according to its record; 0 without a record."""
    try:
        values = read_json(record)
        return max(0.0, values["outcome"]["ended_unix_s"] - values["started_unix_s"])
    except (UserError, KeyError, TypeError):
        return 0.0


def _list_jobs(jobs: Iterable[Job], counted: bool = False) -> list[str]:
    """List jobs by kind: a few by name, more by number. `counted`: always by number."""
    by_kind: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_kind[job.kind].append(job)
    parts = []
    for kind in [kind for kind in KINDS if kind in by_kind]:
        of_kind = by_kind[kind]
        experiments = listing(sorted({job.experiment for job in of_kind if job.experiment}))
        noun = kind if len(of_kind) == 1 else KINDS[kind][0]
        if kind == "report":
            parts.append(kind)
        elif kind in ("tables", "run table"):
            parts.append(f"{noun} of {experiments}")
        elif counted or len(of_kind) > 3:
            parts.append(
                _count(len(of_kind), kind) + (f" of {experiments}" if kind == "figure" else "")
            )
        else:
            parts.append(f"{noun} {listing(job.name for job in of_kind)}")
    return parts


def _suggest_commands(
    jobs: list[Job], found: list[Cause], targets: list[str], call: Call
) -> Iterator[str]:
    """Yield commands that avoid needless runs."""
    start = shlex.join(["snakemake", *call.arguments])
    pushed = sum(job.kind == "run" and set(job.reasons) == {"upstream"} for job in jobs)
    if pushed:
        yield f"{_count(pushed, kind='run')} would start only because data is rebuilt."
        yield "Rebuild the data first: if it is identical, no run starts."
        data = [job.outputs[0] for job in jobs if job.kind in DATA]
        yield f"    {start} {' '.join(data) if len(data) <= 3 else 'corpus tokens'}"
    commands = []
    edited = {
        (cause.label, job.kind)
        for cause in found
        if cause.label in ("code", "rule")
        for job in cause.jobs
    }
    if ("code", "run") in edited:
        command = f"{start} {' '.join(targets) or 'all'} --consider-ancient train=code"
        commands.append(f"{command}   accepts the edit in this call, rebuilds the rest")
    if edited and not {"new", "missing", "unfinished"} & {cause.label for cause in found}:
        commands.append(
            f"{' '.join([start, *targets, '--touch'])}   accepts all files as they are, permanently"
        )
    if commands:
        yield "If an edit cannot change a result:"
        yield from (f"    {command}" for command in commands)


def _count(number: int, kind: str) -> str:
    return count(number, noun=kind, plural=KINDS[kind][0] if kind in KINDS else None)
