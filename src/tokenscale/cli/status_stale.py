"""What would rerun, and why: Snakemake's reasons, gathered by what caused them, in the project's words."""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from tokenscale.cli.snakemake_dry_run import KINDS, Job, planned, snakemake
from tokenscale.settings.calls import NO_OPTIONS, Call
from tokenscale.settings.closure import LISTINGS, list_changes

#: what a cause is called, in the order in which causes are told
LABELS = ("code", "settings", "data", "rule", "inputs", "software", "unfinished", "missing", "new", "forced", "other")
#: what is built before the runs
DATA = ("download", "corpus", "tokenizer", "store")
#: accepts edits of a training's code for one call
ANCIENT = "--consider-ancient train=code"
#: what Snakemake remembers of each output
RECORDS = Path(".snakemake/metadata")


@dataclass(frozen=True)
class Cause:
    """Why jobs would run: a label (see LABELS), what it is, the jobs it hits and those that follow from them."""

    label: str
    text: str
    jobs: list[Job]
    following: list[Job]


def stale(targets: list[str], call: Call = NO_OPTIONS) -> str:
    """What would rerun in this folder's project, for people. Raises UserError where Snakemake cannot plan it."""
    jobs = planned(targets, call)
    return render(jobs, causes(jobs), targets, call)


def causes(
    jobs: list[Job], exists: Callable[[str], bool] = lambda path: Path(path).exists(), records: Path = RECORDS
) -> list[Cause]:
    """Root causes: each with the jobs that it hits itself, and those that run only because these do.

    A job that several causes hit stands under each. `exists` tells a job that ran before, by its log, from one that
    never did; `records` tell which source files it ran with.
    """
    hit: dict[tuple[str, str], list[int]] = defaultdict(list)
    ran_with = _ran_with(records) if any(_is_listing(job.reasons.get("updated", "")) for job in jobs) else {}
    for number, job in enumerate(jobs):
        for cause in dict.fromkeys(_direct(job, exists, ran_with)):
            hit[cause].append(number)
    # files that changed for the same jobs are one cause
    together: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (label, text), numbers in hit.items():
        together[label, tuple(numbers)].append(text)
    after = _following(jobs)
    found = []
    for (label, numbers), texts in together.items():
        reached, todo = set(), list(numbers)
        while todo:
            new = after[todo.pop()] - reached
            reached |= new
            todo += new
        following = [jobs[n] for n in sorted(reached - set(numbers))]
        found.append(Cause(label, _cause_text(label, sorted(texts)), [jobs[n] for n in numbers], following))
    return sorted(found, key=lambda c: (LABELS.index(c.label), -len(c.jobs) - len(c.following), c.text))


def _is_listing(files: str) -> bool:
    return f"{LISTINGS}/" in files


def _ran_with(records: Path) -> dict[tuple[str, str], str]:
    """(a job's log, a listing of source files) → hash of the listing with which the job ran, as Snakemake recorded it.

    Empty where its records are not what is known here: jobs are then told without the names of their files.
    """
    found = {}
    for path in records.rglob("*"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            listings = {file: hashed for file, hashed in record["input_checksums"].items() if _is_listing(file)}
            found |= {
                (log, file): hashed.removeprefix("sha256:")
                for log in record["log"]
                for file, hashed in listings.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _direct(job: Job, exists: Callable[[str], bool], ran_with: dict[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    """(label, text) of each cause that hits this job itself."""
    for reason, text in job.reasons.items():
        files = text.split(", ")
        if reason == "updated":
            for file in files:
                if _is_listing(file):
                    changed = list_changes(Path(file), ran_with.get((job.log or "", file), ""))
                    yield from (("code", name) for name in changed or ["one of its source files"])
                else:
                    yield "data", file
        elif reason == "settings":
            yield "settings", changed_settings(text)
        elif reason == "missing":
            yield ("missing", files[0]) if job.log and exists(job.log) else ("new", "never built")
        elif reason == "unfinished":
            yield "unfinished", files[0]
        elif reason == "rule":
            yield "rule", "its command in workflow/rules changed"
        elif reason == "software":
            yield "software", "its container or environment changed"
        elif reason == "forced":
            yield "forced", "asked for"
        elif reason == "other":
            yield "other", text
        elif reason == "inputs" and len(job.reasons) == 1:  # else the other reason tells which input came or went
            yield "inputs", "it reads other files than before"


def _cause_text(label: str, texts: list[str]) -> str:
    subject = _and(texts if len(texts) <= 3 else [*texts[:2], f"{len(texts) - 2} more files"])
    if label == "missing":
        return f"{subject} (removed, or its job failed)"
    return subject + {"code": " changed", "data": " changed", "unfinished": " was interrupted"}.get(label, "")


def _following(jobs: list[Job]) -> list[set[int]]:
    """For each job the numbers of those that would run because of it, by the files that they say were updated."""
    makes = {output: number for number, job in enumerate(jobs) for output in job.outputs}
    after: list[set[int]] = [set() for _ in jobs]
    for number, job in enumerate(jobs):
        for file in filter(None, job.reasons.get("upstream", "").split(", ")):
            # of several outputs a command names the folder, or the path without its ending
            names = [file, str(Path(file).with_suffix("")), *map(str, Path(file).parents)]
            for maker in [makes[name] for name in names if name in makes][:1]:
                after[maker].add(number)
    return after


def changed_settings(text: str) -> str:
    """What Snakemake says of parameters (`… before: VALUES now: VALUES`) as `key: before → now`.

    JSON is compared key by key; a setting that is not stated has its default.

    >>> changed_settings('''across all output: before: '{"a":{"b":1}}' now: '{"a":{"b":2,"c":true}}' ''')
    'a.b: 1 → 2, a.c: default → true'
    """
    found = re.search(r"before: (.*) now: (.*)", text)
    if not found:
        return text
    (old, *before), (new, *now) = (_values(side) for side in found.groups())
    listed = [f"{k}: {_word(old.get(k))} → {_word(new.get(k))}" for k in sorted(old | new) if old.get(k) != new.get(k)]
    if before or now:
        listed.append(f"{', '.join(before) or 'nothing'} → {', '.join(now) or 'nothing'}")
    return (
        ", ".join(listed if len(listed) <= 4 else [*listed[:3], f"{len(listed) - 3} more"])
        or "its content, known by hash"
    )


def _values(text: str) -> list[Any]:
    """One side of a change: one flat mapping of all its JSON objects, then its other values as text, without hashes."""
    try:
        values = ast.literal_eval(f"[{text}]")
    except (SyntaxError, ValueError):
        values = [] if "<nothing exclusive>" in text else [text.strip()]
    settings: dict[str, Any] = {}
    other = []
    for value in values:
        try:
            inner = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            inner = value
        if isinstance(inner, dict):
            settings |= _flat(inner)
        elif not re.fullmatch(r"[0-9a-f]{64}", str(inner)):
            other.append(_word(inner))
    return [settings, *sorted(other)]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _word(value: Any) -> str:
    text = "default" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def render(
    jobs: list[Job],
    found: list[Cause],
    targets: list[str],
    call: Call = NO_OPTIONS,
    runs: Path = Path("results/runs"),
) -> str:
    """How much would run, then each cause with its jobs, then what can be done about it."""
    if not jobs:
        return "nothing is stale"
    lines = [_headline(jobs)]
    if any(job.kind == "run" for job in jobs):
        lines.append(_trainings([job for job in jobs if job.kind == "run"], runs))
    for cause in found:
        lines += ["", *_wrapped(f"{cause.label:<9} ", cause.text), *_wrapped(" " * 12, _and(_listed(cause.jobs)))]
        if cause.following:
            lines += _wrapped(" " * 9 + "-> ", _and(_listed(cause.following, counted=True)))
    hints = list(_hints(jobs, found, targets, call))
    return "\n".join([*lines, *([""] if hints else []), *hints])


def _headline(jobs: list[Job]) -> str:
    counts = Counter(job.kind if job.kind in ("run", "store") else "job" for job in jobs)
    parts = [_count(counts[kind], kind) for kind in ("run", "store") if counts[kind]]
    if counts["job"]:
        parts.append(_count(counts["job"], "job").replace(" ", " other " if parts else " "))
    return f"{_and(parts)} would run."


def _trainings(jobs: list[Job], runs: Path) -> str:
    """How many trainings on how many ranks, and how long they took when they ran last."""
    sizes = Counter(_world_size(job) for job in jobs)
    text = "trainings: " + ", ".join(f"{n} on {_count(size, 'rank')}" for size, n in sorted(sizes.items()))
    lasted = [(seconds, _world_size(job)) for job in jobs if (seconds := _last_seconds(runs / job.name / "run.json"))]
    if lasted:
        took, over_ranks = sum(s for s, _ in lasted), sum(s * size for s, size in lasted)
        which = "" if len(lasted) == len(jobs) else f" {len(lasted)} of them"
        text += f"; last time{which} took {duration(took)}"
        text += f", {duration(over_ranks)} over all ranks" if over_ranks > took >= 1 else ""
    return text


def _world_size(job: Job) -> int:
    """Ranks of a training, from its id; 1 for an id of another shape."""
    found = re.search(r"-w(\d+)-[0-9a-f]+$", job.name)
    return int(found[1]) if found else 1


def _last_seconds(record: Path) -> float:
    """How long a run took by its record; 0 where there is none."""
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return max(0.0, values["outcome"]["ended_unix_s"] - values["started_unix_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _listed(jobs: Iterable[Job], counted: bool = False) -> list[str]:
    """Jobs by kind, few by name and more by number; `counted`: by number alone."""
    by_kind: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_kind[job.kind].append(job)
    parts = []
    for kind in [kind for kind in KINDS if kind in by_kind]:
        of_kind = by_kind[kind]
        number = len(of_kind)
        experiments = _and(sorted({job.experiment for job in of_kind if job.experiment}))
        if kind == "report":
            parts.append(kind)
        elif kind in ("tables", "run table"):
            parts.append(f"{kind if number == 1 else KINDS[kind][0]} of {experiments}")
        elif counted or number > 3:
            parts.append(_count(number, kind) + (f" of {experiments}" if kind == "figure" else ""))
        else:
            parts.append(f"{kind if number == 1 else KINDS[kind][0]} {_and([job.name for job in of_kind])}")
    return parts


def _hints(jobs: list[Job], found: list[Cause], targets: list[str], call: Call) -> Iterator[str]:
    """Commands that keep runs from running for nothing."""
    start = snakemake(call)
    pushed = sum(job.kind == "run" and set(job.reasons) == {"upstream"} for job in jobs)
    if pushed:
        yield f"{_count(pushed, 'run')} would start only because data is rebuilt. Where it comes out equal, none does:"
        data = [job.outputs[0] for job in jobs if job.kind in DATA]
        yield f"    {start} {' '.join(data) if len(data) <= 3 else 'corpus tokens'}"
    commands = []
    edited = {(cause.label, job.kind) for cause in found if cause.label in ("code", "rule") for job in cause.jobs}
    if ("code", "run") in edited:
        commands.append((f"{start} {' '.join(targets) or 'all'} {ANCIENT}", "rebuilds the rest, this time"))
    if edited and not {"new", "missing", "unfinished"} & {cause.label for cause in found}:
        commands.append((" ".join([start, *targets, "--touch"]), "takes everything as it is, for good"))
    if commands:
        yield "If an edit cannot change a result:"
        yield from (f"    {command}   {meaning}" for command, meaning in commands)


def _wrapped(start: str, text: str) -> list[str]:
    room = " " * len(start)
    return wrap(text, 118, initial_indent=start, subsequent_indent=room, break_long_words=False, break_on_hyphens=False)


def _count(number: int, kind: str) -> str:
    plural = KINDS[kind][0] if kind in KINDS else f"{kind}s"
    return f"{number:,} {kind if number == 1 else plural}"


def _and(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> [duration(s) for s in (0.2, 7.4, 90, 3600, 3 * 3600 + 12 * 60, 60 * 3600)]
    ['under 1 s', '7 s', '1 min 30 s', '1 h', '3 h 12 min', '2 d 12 h']
    """
    for large, size, small, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {large}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
