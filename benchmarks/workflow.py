"""How long Snakemake takes to plan N runs: what a person waits for before anything starts.

In a temporary copy of this project's workflow and package, one experiment expands to the runs, with the real rules and
the real code. Three states are planned: nothing built; everything built; and everything built before all sources
were written anew (a checkout), when Snakemake compares every input by content. Sizes and states are interleaved in each
round, so that drift of the machine affects all equally. Processor seconds stand beside those of the clock: on a busy
machine they are the steadier of the two.
"""

import itertools
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.benchmark.rounds import format_columns, format_spread, group_by, interleave
from tokenscale.cli.main import Parser, exit_code
from tokenscale.runs.records import provenance
from tokenscale.settings.closure import PACKAGE, training_code
from tokenscale.settings.config import Config
from tokenscale.settings.run import APPROACHES

#: what is planned
STATES = {
    "cold": "nothing built",
    "complete": "everything built: nothing to do",
    "checkout": "the same, every source file newer: compared by content",
}
CONFIG = {
    "scale": "demo",
    "experiments": ["wide"],
    "corpora": {"small": {"source": {"kind": "docstrings"}}},
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "small", "vocabulary_size": 300}},
}
FIVE = [approach for approach in APPROACHES if approach != "length-bucketed"]
EXPERIMENT = {
    "question": "How long does planning take?",
    "runs": {"corpus": "small", "tokenizer": "bpe", "model": "llama-micro", "global_batch": 4},
    "factors": {"approach": FIVE, "layout.data": [1, 2]},  # ten cells; learning rates make them more
    "figures": ["loss_over_time"],
    "scales": {"workstation": {}, "alps": {}},  # profiles choose the scale
}
CELLS = 10
NO_PROFILE = "none"
#: the case that plans nothing
START = "start"


def measure(sizes: list[int], rounds: int, states: list[str], profiles: list[str]) -> dict[str, Any]:
    """Time dry runs of so many runs, in these STATES of a temporary project, with each profile; returns the records.

    Without a profile (NO_PROFILE) the call is `snakemake --cores 1 --dry-run`.

    A size is rounded up to a multiple of ten: five approaches on one and two ranks, the rest are learning rates. Raises
    UserError in a folder without a workflow, and for a size or number of rounds below 1.
    """
    if not (file := Path("workflow/Snakefile")).is_file():
        facts = {"folder": Path.cwd(), "expected": file}
        raise UserError("this folder holds no workflow.", **facts, next="cd to the project's folder")
    if min(*sizes, rounds) < 1:
        raise UserError(
            "there is nothing to time.",
            found=f"runs {sizes}, rounds {rounds}",
            expected="1 or more",
            next="--runs 10 --rounds 1",
        )
    machine = provenance.describe_machine()
    with tempfile.TemporaryDirectory(prefix="tokenscale-") as folder:
        projects = {size: _projects(Path(folder) / str(size), size) for size in dict.fromkeys(sizes)}
        cases = [(None, START, NO_PROFILE), *itertools.product(projects, states, profiles)]
        records = []
        for number, (size, state, profile) in interleave(cases, rounds):
            how = ["--cores", "1"] if profile == NO_PROFILE else ["--profile", profile]
            if state == START:
                timed = _timed(Path(folder), "--version")
            else:
                timed = _timed(projects[size][state], *how, "--dry-run")
            records.append({"size": size, "state": state, "profile": profile, "round": number, **timed})
        counts = {size: _counts(of_size["cold"]) for size, of_size in projects.items()}
    return {
        "benchmark": "workflow",
        "rounds": rounds,
        "sizes": counts,
        "hardware": machine,
        "versions": {"python": platform.python_version(), "snakemake": metadata.version("snakemake")},
        "records": records,
    }


def table(result: dict[str, Any]) -> str:
    """The result for a terminal: medians and ranges over rounds."""
    machine, versions = result["hardware"], result["versions"]
    load = f", load before {machine['load_average_1min']:.1f}" if "load_average_1min" in machine else ""
    head = (
        f"snakemake --dry-run, {result['rounds']} rounds; "
        f"Snakemake {versions['snakemake']}, Python {versions['python']}; "
        f"{machine.get('cpu', machine['architecture'])}, {machine['cores']} cores{load}"
    )
    rows = [("state", "profile", "runs", "jobs", "source files a run", "seconds (rounds)", "CPU s")]
    by_case = group_by(result["records"], "size", "state", "profile")
    for size, state, profile in sorted(by_case, key=lambda case: (case[0] or 0, *case[1:])):
        records, counts = by_case[size, state, profile], result["sizes"].get(size)
        facts = (f"{counts['runs']}", f"{counts['jobs']}", f"{counts['source_files']:.1f}") if counts else ("", "", "")
        cpu = statistics.median(record["cpu_s"] for record in records)
        rows.append((state, profile, *facts, format_spread([r["seconds"] for r in records]), f"{cpu:.2f}"))
    lines = [head, format_columns(rows, 2)]
    lines += [f"{state}: {text}" for state, text in STATES.items() if any(state == row[0] for row in rows)]
    lines.append("start: `snakemake --version`, which every call pays: Python and Snakemake's own imports")
    return "\n".join(lines)


def _projects(folder: Path, size: int) -> dict[str, Path]:
    """A project of so many runs in every state."""
    roots = {state: folder / state for state in STATES}
    cold, complete, checkout = roots.values()
    for name in ("workflow", "profiles"):
        shutil.copytree(name, cold / name)
    (cold / "alps").symlink_to("profiles/alps")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(PACKAGE, cold / "src" / PACKAGE.name, ignore=ignored)
    (cold / "config/experiments").mkdir(parents=True)
    (cold / "config/config.yaml").write_text(json.dumps(CONFIG))
    (cold / "config/claims.yaml").write_text(json.dumps({"documents": {}, "claims": {}}))
    rates = [round(1e-4 * (1 + i / 1000), 9) for i in range(-(-size // CELLS))]
    factors = EXPERIMENT["factors"] | {"optimizer.learning_rate": rates}
    (cold / "config/experiments/wide.yaml").write_text(json.dumps(EXPERIMENT | {"factors": factors}))
    shutil.copytree(cold, complete, symlinks=True)
    for line in _snakemake(complete, "--summary").splitlines()[1:]:
        output = complete / line.split("\t")[0]
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("{}")
    # Snakemake records what it touches; on one thread each, jobs are touched side by side
    threads = ["--set-threads", "train=1"]
    _snakemake(complete, "--cores", "256", "--touch", "--forceall", *threads)
    shutil.copytree(complete, checkout, symlinks=True)
    for path in (checkout / "src").rglob("*.py"):
        path.touch()
    for root in (complete, checkout):
        if "Nothing to be done" not in _snakemake(root, "--cores", "1", "--dry-run"):
            raise RuntimeError(f"{root}: not complete")
    return roots


def _counts(root: Path) -> dict[str, Any]:
    """How many runs and jobs a project has, and how many source files a run reads on average."""
    text = _snakemake(root, "--cores", "1", "--dry-run", "--quiet", "host", "rules")
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", text, re.MULTILINE))
    code = [len(training_code(run.settings)) for run in Config(CONFIG, root=root).runs("wide")]
    return {"runs": len(code), "jobs": int(jobs["total"]), "source_files": statistics.mean(code)}


def _timed(root: Path, *arguments: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    _snakemake(root, *arguments)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": seconds, "cpu_s": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def _snakemake(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", *arguments]
    environment = {"ALPS_ACCOUNT": "none"} | os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise UserError(
            "Snakemake failed.",
            command=" ".join(arguments),
            snakemake=done.stdout[-2000:],
            next="run this command in a terminal and correct what it reports",
        )
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python benchmarks/workflow.py", description=__doc__)
    parser.add_argument("--runs", nargs="+", type=int, default=[500, 2000], metavar="N", help="numbers of runs to plan")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="every case is timed once in each round")
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=list(STATES), help="default: all of them")
    parser.add_argument("--profiles", nargs="+", default=[NO_PROFILE], metavar="NAME", help="Snakemake profiles")
    parsed = parser.parse_args(arguments)
    return exit_code(
        lambda: print(table(measure(parsed.runs, parsed.rounds, parsed.states, parsed.profiles))),
        f"{parser.prog} --help",
    )


if __name__ == "__main__":
    raise SystemExit(main())
