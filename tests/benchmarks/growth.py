"""Measure how seconds and memory of the workflow's commands grow with the runs of a campaign.

    python tests/benchmarks/growth.py                # 100 and 1,000 runs
    python tests/benchmarks/growth.py --runs 10000   # half a gigabyte of disk

A campaign is one experiment in a project of its own: cells with ten repeats each, of which every
run has the logs of 24 steps, sealed like those of a training. Each command is a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import logs  # noqa: E402  # a script's folder is on the path, not the project's
from tokenscale.base.errors import UserError  # noqa: E402
from tokenscale.base.files import write_json, write_sealed  # noqa: E402
from tokenscale.benchmark.rounds import format_columns  # noqa: E402
from tokenscale.cli.main import Parser, exit_code  # noqa: E402
from tokenscale.settings.config import load_config  # noqa: E402
from tokenscale.settings.experiments import Run  # noqa: E402

NAME = "campaign"
REPEATS = 10
STEPS = 24
#: seconds from the start of a run to that of the next one
RUN_S = 100.0
#: of so many runs one is a failed job of Snakemake's last call
FAILED = 10
APPROACHES = ["padding-free", "token-list"]
COMMANDS: dict[str, list[str]] = {
    "ingest": [
        "tokenscale",
        "ingest",
        f"--experiment=results/experiments/{NAME}/runs.json",
        f"--kept=results/run-tables/{NAME}",
        f"--output=results/tables/{NAME}",
    ],
    "validate": [
        "tokenscale",
        "validate",
        f"--experiment=results/experiments/{NAME}/runs.json",
        f"--kept=results/run-tables/{NAME}",
        f"--tables=results/tables/{NAME}",
    ],
    "status": ["tokenscale", "status"],
    "status --failed": ["tokenscale", "status", "--failed"],
    "claims": ["tokenscale", "claims", f"--experiments={NAME}", "--output=results/report"],
    "page": [
        "tokenscale",
        "report",
        "page",
        f"--experiments={NAME}",
        "--claims=results/report/claims.json",
        "--output=results/report/index.html",
    ],
}
#: runs a module as `python -m` does, and writes the peak of its own resident memory in KiB to a file
CHILD = """
import runpy, sys
from pathlib import Path
file, module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    lines = Path("/proc/self/status").read_text().splitlines()
    Path(file).write_text(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
"""


@dataclass(frozen=True)
class Cost:
    """What one command took. `cpu_s` includes the processes that it started."""

    runs: int
    command: str
    seconds: float
    cpu_s: float
    peak_mb: float


def measure(runs: int, repeats: int, folder: Path) -> Iterator[Cost]:
    """Yield the cost of each command on a campaign of so many runs, which is made in `folder`.

    The whole campaign lacks one run when it is ingested first.
    """
    make_project(folder, cells=runs // repeats, repeats=repeats)
    yield run_command(folder, runs, "snakemake -n", ["snakemake", "-n", "runs"])
    with chdir(folder):
        planned = load_config().runs(NAME)
        table = load_config().table(NAME)
    write_sealed(folder / f"results/experiments/{NAME}/runs.json", table)
    *first, last = planned
    for run in first:
        write_logs(folder / "results/runs", run)
    for command in ("ingest", "validate"):
        yield run_command(folder, runs, f"{command}, whole", COMMANDS[command])
    write_logs(folder / "results/runs", last)
    for command in ("ingest", "validate"):
        yield run_command(folder, runs, f"{command}, one new run", COMMANDS[command])
    write_failures(folder, planned[::FAILED])
    for command in ("status", "status --failed", "claims", "page"):
        yield run_command(folder, runs, command, COMMANDS[command])


def make_project(folder: Path, cells: int, repeats: int) -> None:
    """Make a project whose only experiment is the campaign."""
    for name in ("workflow", "arms", "profiles", "src"):
        (folder / name).symlink_to(ROOT / name)
    runs = {
        "corpus": "docstrings",
        "tokenizer": "tekken",
        "model": "llama-micro",
        "budget": {"steps": STEPS},
        "device": "cpu",
    }
    rates = np.geomspace(1e-5, 1e-2, max(cells // len(APPROACHES), 1)).round(9).tolist()
    experiment = {
        "question": "What does a campaign cost?",
        "runs": runs,
        "factors": {"approach": APPROACHES, "optimizer.learning_rate": rates},
        "repeats": repeats,
        "figures": [],
        "scales": {"workstation": {}, "alps": {}, "study": {}, "campaign": {}},
    }
    rate = "SELECT useful_tokens_per_s AS value, run_id, series AS cell FROM throughput"
    claim = {
        "document": "none",
        "claim": "runs train",
        "experiments": [NAME],
        "sentence": "They train on {number} useful tokens a second.",
        "direction": "above",
    }
    claims = {
        "each-cell": claim | {"sql": rate, "compares": "approach"},
        "all-runs": claim | {"sql": rate.replace("series", "''")},
    }
    config = {
        "scale": "demo",
        "experiments": [NAME],
        "corpora": {"docstrings": {"source": {"kind": "docstrings"}}},
        "tokenizers": {"tekken": {"kind": "tekken"}},
    }
    write_json(folder / "config/config.yaml", config)
    write_json(folder / f"config/experiments/{NAME}.yaml", experiment)
    write_json(
        folder / "config/claims.yaml", {"documents": {"none": {"title": "None"}}, "claims": claims}
    )


def write_logs(runs: Path, run: Run) -> None:
    """Write a sealed run whose steps vary by 2 %, `RUN_S` after the run before it in the plan."""
    settings = run.settings
    place = RUN_S * (1 + run.position)
    began = 1.7e9 + place - logs.began_s(settings)
    folder = logs.write_run(runs, settings, attempts=[{"boot_s": place, "t0": began}])
    random = np.random.default_rng(run.position)
    # runs of equal samples have equal losses
    of_samples = np.random.default_rng(settings.repeat)

    def vary(step: dict[str, Any]) -> dict[str, Any]:
        slower = float(np.exp(random.normal(0, 0.02)))
        return step | {
            "step_s": slower * step["step_s"],
            "loss_sum": step["loss_sum"] * (1 + 1e-3 * of_samples.random()),
        }

    logs.edit(folder, vary)
    logs.retime(folder)


def write_failures(folder: Path, runs: list[Run]) -> None:
    """Write the log of a Snakemake call in which the trainings of these runs failed."""
    events = folder / ".snakemake/log/2026-11-21T161155.1.snakemake.jsonl"
    events.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, run in enumerate(runs):
        log = f"results/logs/train/{run.run_id}.log"
        (folder / log).parent.mkdir(parents=True, exist_ok=True)
        (folder / log).write_text("ValueError: no tokens\n")
        event = {
            "event": "job_error",
            "rule": "train",
            "jobid": number,
            "output": [f"results/runs/{run.run_id}/done.json"],
            "log": [log],
            "reason": "",
            "message": "",
            "slurm": None,
        }
        lines.append(json.dumps(event) + "\n")
    events.write_text("".join(lines))


def run_command(folder: Path, runs: int, name: str, command: list[str]) -> Cost:
    """Run a module with arguments in a project. Raises UserError where it fails."""
    peak = folder / "peak.txt"
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    output = folder / "output.txt"
    start = time.perf_counter()
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(peak), *command],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(
            "a command of the campaign failed.",
            command=name,
            runs=runs,
            says=output.read_text()[-2000:],
            next=f"cd {folder}; python -m {' '.join(command)}",
        )
    return Cost(
        runs=runs,
        command=name,
        seconds=seconds,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=int(peak.read_text()) * 1024 / 1e6,
    )


def format_costs(costs: list[Cost]) -> str:
    """Return a line for each command, with three columns for each number of runs."""
    sizes = list(dict.fromkeys(cost.runs for cost in costs))
    found = {(cost.command, cost.runs): cost for cost in costs}
    head = ["command"]
    for size in sizes:
        head += [f"{size:,} runs: s", "CPU s", "peak MB"]
    rows = [head]
    for command in dict.fromkeys(cost.command for cost in costs):
        row = [command]
        for size in sizes:
            cost = found[command, size]
            row += [f"{cost.seconds:.1f}", f"{cost.cpu_s:.1f}", f"{cost.peak_mb:.0f}"]
        rows.append(row)
    return format_columns(rows)


def measure_sizes(sizes: list[int], repeats: int, folder: Path | None, keep: bool) -> list[Cost]:
    """Measure each size in a folder of its own below `folder`, and print each cost as it is known.

    Raises UserError for a size that is no whole number of cells of each approach.
    """
    costs = []
    for size in sizes:
        if size <= 0 or size % (repeats * len(APPROACHES)):
            raise UserError(
                "a campaign has whole cells of each approach.",
                flag="--runs",
                requested=size,
                expected=f"a multiple of {repeats * len(APPROACHES)}",
                next=f"--runs {10 * repeats * len(APPROACHES)}",
            )
        project = Path(tempfile.mkdtemp(prefix=f"growth-{size}-", dir=folder))
        for cost in measure(size, repeats, project):
            print(
                f"{size:,} runs, {cost.command}: {cost.seconds:.1f} s, {cost.peak_mb:.0f} MB",
                file=sys.stderr,
                flush=True,
            )
            costs.append(cost)
        if not keep:
            shutil.rmtree(project)
    return costs


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/growth.py", description=__doc__)
    parser.add_argument(
        "--runs", nargs="+", type=int, default=[100, 1000], metavar="N", help="sizes of campaigns"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="repeats of each cell"
    )
    parser.add_argument("--folder", type=Path, help="where projects are made (default: temporary)")
    parser.add_argument("--keep", action="store_true", help="leave the projects there")
    parsed = parser.parse_args(arguments)
    options = (parsed.runs, parsed.repeats, parsed.folder, parsed.keep)
    return exit_code(lambda: print(format_costs(measure_sizes(*options))), f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
