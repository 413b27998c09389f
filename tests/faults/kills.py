"""Kills at random moments of every rule and of Snakemake itself, and what the next call of the
workflow makes of them.

One trial: a project at some stage of a small workflow (three approaches, one of them on two ranks,
a report) goes on, something of it is killed, it is called again, and what then lies there is
compared with a build that nobody disturbed.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb

from tests.workflow import forked
from tests.workflow.conftest import RUNS, Project, copy_of, make_project

CONFIG = {
    "scale": "demo",
    "corpora": {
        "small": {
            "source": {"kind": "docstrings", "packages": ["pydoc_data"], "maximum_documents": 80}
        }
    },
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "small", "vocabulary_size": 300}},
}
EXPERIMENT = {
    "question": "Does a killed workflow lose anything?",
    "runs": RUNS
    | {"checkpoints": {"every": 1, "final": True}, "validation": {"rows": 4, "every": 2}},
    "factors": {
        "approach, layout.data": [["pretokenized-padded", 1], ["token-list", 1], ["packed", 2]]
    },
    "figures": ["loss_over_time"],
}
#: stage → what is built before it begins; the last call of all builds the report
STAGES = {
    "corpus": [],
    "tokenizer": ["corpus"],
    "tokens": ["results/tokenizers/bpe/manifest.json"],
    "runs": ["tokens"],
    "tables": ["runs"],
    "report": ["tables"],
}
#: what is killed → the stage that it is part of, and the first of its arguments
VICTIMS = {
    "corpus": ("corpus", ("corpus",)),
    "tokenizer": ("tokenizer", ("tokenizer",)),
    "format padded": ("tokens", ("pretokenize", "padded")),
    "format token-list": ("tokens", ("pretokenize", "token-list")),
    "format packed": ("tokens", ("pretokenize", "packed")),
    "launcher": ("runs", ("launch",)),
    "one of the ranks": ("runs", ("rank",)),
    "ingest": ("tables", ("ingest",)),
    "validate": ("tables", ("validate",)),
    "claims": ("report", ("claims",)),
    "figure": ("report", ("report", "figure")),
    "description": ("report", ("report", "description")),
    "page": ("report", ("report", "page")),
    "PDF": ("report", ("report", "pdf")),
    "bundle": ("report", ("report", "bundle")),
}
#: beside these: Snakemake alone, so that its jobs live on, and all processes at once
WHOLE = ("Snakemake", "everything")
#: SIGSTOP is followed by SIGCONT, or by SIGKILL
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
#: longest time between SIGSTOP and what follows it
STOPPED_S = 3.0
END_S = 600.0
#: how often a kill is tried again, earlier, where its victim had ended before
TRIES = 4


@dataclass(frozen=True)
class Kill:
    """What is killed how, and when: a share of the victim's usual time."""

    number: int
    victim: str
    signal: str
    stage: str
    moment: float


def drawn(number: int, seed: int) -> Kill:
    """The kill of this number: victims and signals in turn, each pair equally often; the moment at
    random.
    """
    victims = [*VICTIMS, *WHOLE]
    pick = random.Random(f"{seed}-{number}")
    victim = victims[number % len(victims)]
    stage = VICTIMS[victim][0] if victim in VICTIMS else pick.choice(list(STAGES))
    return Kill(
        number,
        victim,
        SIGNALS[number // len(victims) % len(SIGNALS)],
        stage,
        round(pick.random(), 4),
    )


def lies_in(root: Path) -> dict[str, Any]:
    """What must be the same after any kills: name → digest or values. `build.json` says how long a
    build took.
    """
    # not above: forks of who imports this module run the tokenscale of a copied project
    from tests.logs import series

    found: dict[str, Any] = {}
    results = root / "results"
    for path in sorted(p for p in results.rglob("*") if p.is_file() and p.name != ".lock"):
        name = str(path.relative_to(results))
        if re.match(
            r"(corpus|tokenizers|tokens)/(?!.*build\.json$)|runs/[^/]+/checkpoints/.*\.safetensors$",
            name,
        ):
            found[name] = sha256(path.read_bytes()).hexdigest()
        elif not re.search(r"/attempt=|^logs/", name):
            found[name] = "there"
    for run in sorted(results.glob("runs/*")):
        found[f"steps of {run.name}"] = series(run)
    for path in sorted(results.glob("tables/*/*.parquet")):
        if path.stem not in OF_LOGS:
            found[f"table {path.stem}"] = table(path)
    return found


#: tables of what was logged, attempt by attempt
OF_LOGS = ("attempts", "events", "spans", "quarantine", "logged", "records")
#: columns of the tables that tell of time, of the machine, or of how often a run was begun
VARYING = re.compile(
    r"_s$|_unix|_bytes$|attempt|seal|overlap|quarantined|seconds|mfu|rate$|per_second|flops|node_names|memory|job_ids"
    r"|threads_per_rank|oversubscribed|load_average"
)


def table(path: Path) -> dict[str, list[str]]:
    """Column → values of a table without the columns that may differ; rows in an order of their
    own.
    """
    with duckdb.connect() as connection:
        rows = connection.sql(f"SELECT * FROM '{path}'")
        kept = [column for column in rows.columns if not VARYING.search(column)]
        found = sorted(
            [*map(repr, row)] for row in rows.project(*[f'"{c}"' for c in kept]).fetchall()
        )
    return {column: [row[number] for row in found] for number, column in enumerate(kept)}


def small_project(folder: Path, name: str, experiment: dict[str, Any]) -> Project:
    """A project with one experiment of the small corpus, and no claims."""
    project = make_project(folder)
    config = project.root / "config"
    (config / "config.yaml").write_text(json.dumps(CONFIG | {"experiments": [name]}))
    (config / "claims.yaml").write_text(json.dumps({"documents": {}, "claims": {}}))
    empty(config / "experiments").joinpath(f"{name}.yaml").write_text(json.dumps(experiment))
    return project


class Lab:
    """The project at each of its stages, and what an undisturbed build of it holds; made when first
    asked for.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def made(self) -> None:
        """Build it stage by stage, a copy of each kept, and note how long each job took."""
        if (self.folder / "made").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        first = self.folder / "building"
        first.mkdir(parents=True)
        project = small_project(first, "ways", EXPERIMENT)
        durations: dict[str, float] = {}
        for stage, targets in [*STAGES.items(), ("end", ["all"])]:
            began = time.monotonic()
            if targets:
                with jobs_of(self.folder / "jobs" / stage) as jobs:
                    code, text = forked.snakemake(
                        call(*targets), project.root, environment(project, jobs)
                    )
                    assert code == 0, text[-6000:] + project.logs()
                    durations |= taken(jobs)
            durations[f"before {stage}"] = time.monotonic() - began
            copy_of(project, empty(self.folder / stage))
        (self.folder / "durations.json").write_text(json.dumps(durations, indent=1))
        (self.folder / "made").touch()

    @cached_property
    def durations(self) -> dict[str, float]:
        return json.loads((self.folder / "durations.json").read_text())

    @cached_property
    def expected(self) -> dict[str, Any]:
        return lies_in(self.folder / "end/project")

    def usual_s(self, kill: Kill, stages: int | None = None) -> float:
        """How long what is killed takes: a job, or this many stages behind its own, by default
        all.
        """
        if kill.victim in VICTIMS:
            return self.durations[kill.victim]
        names = [*STAGES, "end"]
        behind = names[names.index(kill.stage) + 1 :]
        return sum(self.durations[f"before {name}"] for name in behind[:stages])


def call(*targets: str) -> list[str]:
    return ["--profile", "profiles/default", "--cores", "2", *targets]


def environment(project: Project, jobs: Path) -> dict[str, str]:
    return project.environment | {"SERVED_JOBS": str(jobs)}


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def jobs_of(folder: Path):
    """A folder in which jobs tell of themselves (served.py); those that are left at the end are
    ended.
    """
    yield empty(folder)
    send(signal.SIGKILL, left(folder))


def arguments_of(jobs: Path) -> dict[int, list[str]]:
    return {int(p.name): json.loads(p.read_text()) for p in jobs.iterdir() if p.name.isdigit()}


def left(jobs: Path) -> list[int]:
    return [job for job in arguments_of(jobs) if not (jobs / f"{job}.ended").exists()]


def victim_of(arguments: list[str]) -> str | None:
    for name, (_, words) in VICTIMS.items():
        if arguments[0] == words[0] and (
            len(words) == 1 or any(a.startswith(words[1]) for a in arguments[1:])
        ):
            return name
    return None


def taken(jobs: Path) -> dict[str, float]:
    """Victim → seconds of its longest job."""
    found: dict[str, float] = {}
    for job, arguments in arguments_of(jobs).items():
        name = victim_of(arguments)
        ended = jobs / f"{job}.ended"
        if name and ended.exists():
            found[name] = max(
                found.get(name, 0.0), ended.stat().st_mtime - (jobs / str(job)).stat().st_mtime
            )
    return found


def until(ready: Callable[[], Any], alive: Callable[[], bool], limit_s: float = END_S) -> Any:
    """What `ready` finds, asked again and again while the workflow lives; None where it found
    nothing.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := ready():
            return found
        if not alive():
            return ready()
        time.sleep(0.004)
    return None


def strike(
    kill: Kill, usual_s: float, running: forked.Started, jobs: Path, pick: random.Random
) -> bool:
    """Send the signal at its moment. False where what it was meant for had ended."""

    def meant() -> list[int]:
        if kill.victim in WHOLE:
            return [running.pid] if running.alive else []
        return sorted(
            job for job in left(jobs) if victim_of(arguments_of(jobs)[job]) == kill.victim
        )

    number = getattr(signal, kill.signal)
    if not until(meant, lambda: running.alive):
        return False
    time.sleep(kill.moment * usual_s)
    others = left(jobs)
    if not (still := meant()):
        return False
    struck = [-running.pid, *others] if kill.victim == "everything" else [pick.choice(still)]
    there = send(number, struck) or kill.victim == "everything"
    if number == signal.SIGSTOP:
        time.sleep(STOPPED_S * pick.random())
        send(pick.choice([signal.SIGCONT, signal.SIGKILL]), struck)
    return there


def send(number: int, jobs: list[int]) -> bool:
    """Send a signal to processes, or to the group of a negative number; whether all were there."""
    there = True
    for job in jobs:
        try:
            os.kill(job, number)
        except ProcessLookupError:
            there = False
    return there


def trial(lab: Lab, kill: Kill, folder: Path, seed: int) -> dict[str, Any]:
    """Kill, call again, compare. The row of the campaign's log: what was injected, and all that was
    lost (nothing).
    """
    began = time.monotonic()
    project = copy_of(Project(lab.folder / kill.stage / "project"), empty(folder))
    with jobs_of(folder / "jobs") as jobs:
        struck, first = killed(kill, lab.usual_s(kill), project, jobs, seed)
        alive = len(left(jobs))
        struck_s = time.monotonic() - began
        lost, said = ended(project, jobs)
    lost = lost or differences(lies_in(project.root), lab) + leftovers(project.root)
    row = asdict(kill) | {"injected": struck, "exit_code": first, "jobs_alive": alive}
    row |= {
        "seconds": round(time.monotonic() - began, 1),
        "struck_s": round(struck_s, 1),
        "lost": lost,
    }
    return row | ({"said": said[-1500:]} if lost else {})


def chain(lab: Lab, kills: list[Kill], folder: Path, seed: int) -> list[str]:
    """One project, from before the first kill's stage to its end: each call is killed but the
    last.
    """
    lost: list[str] = []
    project: Project | None = None
    with jobs_of(folder.with_name("jobs")) as jobs:
        for kill in kills:
            for _ in range(TRIES):
                project = project or copy_of(
                    Project(lab.folder / kill.stage / "project"), empty(folder)
                )
                if killed(kill, lab.usual_s(kill, 1), project, jobs, seed)[0]:
                    break
                lost += ended(project, jobs)[0] or differences(lies_in(project.root), lab)
                project = None
                kill = replace(kill, moment=kill.moment / 2)
            else:
                lost.append(f"{kill.victim} always ended before its signal")
        if project:
            lost += ended(project, jobs)[0] or differences(lies_in(project.root), lab)
    return lost


def killed(kill: Kill, usual_s: float, project: Project, jobs: Path, seed: int) -> tuple[bool, int]:
    """A call in which that is killed: whether a signal was sent, and the exit code."""
    pick = random.Random(f"{seed}-{kill.number}-which")
    running = forked.Started(call(), project.root, environment(project, jobs))
    struck = strike(kill, usual_s, running, jobs, pick)
    return struck, running.wait(END_S)[0]


def ended(project: Project, jobs: Path) -> tuple[list[str], str]:
    """A call that nobody disturbs: what is wrong with how it ended, and all that it said."""
    code, said = forked.snakemake(call(), project.root, environment(project, jobs), END_S)
    if code != 0:
        return [f"the next call ends with {code}: {said[-1500:]}{project.logs()}"], said
    if not until(lambda: not left(jobs), lambda: True, 10):
        return [f"processes are left: {[arguments_of(jobs)[j] for j in left(jobs)]}"], said
    return [], said


def leftovers(root: Path) -> list[str]:
    """What no finished call may leave: locks of Snakemake, temporary files and halves of them."""
    patterns = (".snakemake/locks/*", "results/**/.tokenscale-*", "results/**/*.part*")
    return [
        f"left over: {path.relative_to(root)}"
        for pattern in patterns
        for path in sorted(root.glob(pattern))
        if path.name != "parts"
    ]


def differences(found: dict[str, Any], lab: Lab) -> list[str]:
    """What is missing, too much or other than in a build that nobody disturbed."""
    expected = lab.expected
    return [
        *(f"missing: {name}" for name in sorted(expected.keys() - found.keys())),
        *(f"left over: {name}" for name in sorted(found.keys() - expected.keys())),
        *(
            f"differs: {name}{describe_columns(found[name], expected[name])}"
            for name in sorted(expected)
            if name in found and found[name] != expected[name]
        ),
    ]


def describe_columns(found: Any, expected: Any) -> str:
    """Return which columns of a table differ, with their values; empty if these are no tables."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return ""
    other = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return "".join(f"; {name}: {found.get(name)}, not {expected.get(name)}" for name in other)
