"""Each job of the small workflow while a system call on its results fails, and then again: `python
-m` this module with

    LAB FOLDER STAGES TRIES SEED

`TRIES` faults a job of these stages (joined by commas), or at the stage `end` a command, are drawn:
a call, an errno, and the first failing call of its kind. A process has `shim.c` preloaded. Prints a
line of JSON a try; jobs whose fault was not reached are left out.
"""

import errno
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tests.preloaded  # noqa: F401  jobs are forks
from tests.faults.kills import STAGES, lies_in
from tests.faults.without_room import list_jobs, run
from tests.web import Server, Web

CALLS = ("open", "read", "write", "fsync", "close", "rename", "mkdir", "unlink", "flock")
#: what a sick disk, a file system that is away, a limit or a missing right gives
ERRORS = ("EIO", "ESTALE", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EMFILE", "ENFILE")
ERRORS += ("EFBIG", "ENOLCK", "ETIMEDOUT", "EBUSY", "EREMOTEIO", "ENOMEM", "ENODEV", "ENXIO")
ERRORS += ("EDEADLK", "ENOTCONN", "EHOSTDOWN")
#: how names of targets of commands begin
TARGET = "mine"
#: batches of a loader that reads a Parquet file in each pass
LOADER = """
import numpy as np
import pyarrow.parquet as pq

def make_loader(rank, world_size, epoch, seed):
    rows = len(pq.read_table("{text}"))
    order = np.random.default_rng((seed, epoch)).permutation(min(rows, 32))
    for row in order[rank::world_size]:
        yield np.full((1, 8), row)
"""
#: which calls fail: the first one alone, the second, the tenth, or all from the third on
RANGES = ((1, 1), (2, 2), (10, 10), (3, 1 << 30))


def compile_shim(folder: Path) -> Path:
    """Return the shared object of `shim.c`, made in `folder`. Raises OSError without a compiler."""
    source = Path(__file__).with_name("shim.c")
    target = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return target


def try_faults(
    lab: Path, folder: Path, stages: list[str], tries: int, draw: random.Random, web: Web
) -> Iterator[dict]:
    log = folder / "reached.txt"
    for start, behind in itertools.pairwise([*STAGES, "end", "end"]):
        if start not in stages:
            continue
        project = folder / start
        shutil.copytree(lab / start / "project", project, symlinks=True)
        results = project / "results"
        arguments = "project/results/arguments"
        shutil.copytree(lab / behind / arguments, results / "arguments", dirs_exist_ok=True)
        before = folder / "before"
        for job in list_commands(project, web) if start == behind else list_jobs(lab, behind):
            remove_targets(results)
            shutil.rmtree(before, ignore_errors=True)
            shutil.copytree(results, before, symlinks=True)
            assert run(job, project)[0] == 0
            expected = find_results(project)
            for _ in range(tries):
                shutil.rmtree(results)
                shutil.copytree(before, results, symlinks=True)
                call = draw.choice(CALLS)
                name = draw.choice(ERRORS)
                first, last = draw.choice(RANGES)
                number = getattr(errno, name)
                shim = f"{results} {call} {number} {first} {last}"
                log.write_text("")
                code, said = run(job, project, environment={"SHIM": shim, "SHIM_LOG": str(log)})
                reached = log.read_text().splitlines()
                if not reached:
                    continue
                if code == 0:
                    remove_targets(results)
                again, then = run(job, project)
                made = find_results(project)
                yield {
                    "job": job,
                    "fault": f"{call} {name} {first}-{last}",
                    "reached": reached[0],
                    "code": code,
                    "said": said,
                    "again": again,
                    "then": then[-800:],
                    "temporary": [path.name for path in results.rglob(".tokenscale-*")],
                    "differs": sorted(
                        name for name, value in expected.items() if made.get(name) != value
                    ),
                }


def remove_targets(results: Path) -> None:
    """Remove what a command made: none replaces a finished target."""
    for made in results.glob(f"{TARGET}*"):
        shutil.rmtree(made) if made.is_dir() else made.unlink()


def list_commands(project: Path, web: Web) -> list[list[str]]:
    """Return commands that no job of the workflow is, on the results of a finished one. Those of
    `cloud` write to a bucket; `tests/faults/test_cloud.py` kills them.
    """
    run = next(project.glob("results/runs/packed-*")).relative_to(project)
    text = "results/corpus/small/train-00000.parquet"
    tokenizer = "results/tokenizers/bpe"
    model = f"--checkpoint {run}/checkpoints/final"
    target = f"results/{TARGET}"
    logs = write_logs(project)
    web.files["/text.txt"] = b"Once upon a time. " * 4000
    source = {"kind": "url", "files": [f"{web.address}/text.txt"], "separator": "."}
    settings = json.dumps({"name": "web", "source": source}, separators=(",", ":"))
    (project / "a_loader.py").write_text(LOADER.format(text=text))
    lines = [
        f"convert results/tokens/small/{Path(tokenizer).name}/token-list {target}.bin --to nanogpt",
        f"pretokenize --input-path {text} --output-dir {target} --tokenizer-name {tokenizer}"
        " --format padded",
        f"advise {text} --tokenizer {tokenizer}",
        f"trace {run} --step 2 --output {target}.html",
        f"diff results/report results/report --output {target}.md",
        f"report rebuild results/report/logs.json.xz --output {target}",
        f"export {model} --output {target}",
        f"track {run} --to tensorboard --output {target}",
        f"generate {model} --prompt the",
        f"evaluate {model}",
        f"judge {logs[0]} {logs[1]} --over {logs[2]} {logs[3]} --global-batch 8 --sequence-length 128"
        f" --devices 1 --output {target}",
        f"golden {logs[0]} {logs[0]}",
        "audit a_loader:make_loader --vocabulary-size 99999 --worlds 1 2 --ask vocabulary",
        f"download --settings {settings} --output {target}/manifest.json",
        f"mixture --names small --sources results/corpus/small/manifest.json --output {target}/manifest.json",
        "verify results/report",
        "status",
    ]
    return [line.split() for line in lines]


def write_logs(project: Path) -> list[str]:
    """Write four logs of another trainer below results, and return their names."""
    names = []
    for number in range(4):
        names.append(f"results/log-{number}.txt")
        lines = [
            f"iter {step}: loss {4 - step / 50 + number / 999:.4f}, time {90 + (step * 7 + number) % 5}.{number}ms"
            for step in range(12)
        ]
        (project / names[-1]).write_text("\n".join(lines))
    return names


def find_results(project: Path) -> dict[str, object]:
    """Return what a job's results must be whatever happened before: not what was timed, or has the
    time in its name.
    """
    varying = re.compile(r"table|code/|.*\.tfevents\.")
    return {name: value for name, value in lies_in(project).items() if not varying.match(name)}


if __name__ == "__main__":
    lab, folder = map(Path, sys.argv[1:3])
    if "shim.so" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(compile_shim(folder))
        os.execv(sys.executable, [sys.executable, "-m", "tests.faults.sick_disk", *sys.argv[1:]])
    stages = sys.argv[3].split(",")
    tries = int(sys.argv[4])
    with Server() as web:
        for found in try_faults(lab, folder, stages, tries, random.Random(sys.argv[5]), web):
            print(json.dumps(found), flush=True)
