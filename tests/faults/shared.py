"""Two nodes at one folder of a file system that they share: who is told to wait, who may go on, and what is lost.

    python -m tests.faults.shared MOUNT_A MOUNT_B evidence/faults/shared.jsonl --folder LAB

The mounts are two clients of one file system, such as two mounts of a GlusterFS volume. Each node is a process with a
host name of its own (`unshare --uts`, which only root may) that works below its own mount. A line of the log is a
scene: what was tried, what was said, what was lost.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.kills import Lab, call, differences, until
from tests.workflow.conftest import Project, copy_of

NAMED = 'hostname "$1" && shift && exec "$@"'
LIMIT_S = 300.0


class Node:
    def __init__(self, name: str, folder: Path):
        self.name, self.project = name, Project(folder / "project")

    def start(self, *arguments: str) -> subprocess.Popen:
        """`python -m` that, in the project, on its way, with a process group of its own; both outputs together."""
        return subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", NAMED, "sh", self.name, sys.executable, "-m", *arguments],
            cwd=self.project.root,
            env=self.project.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        text, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, text


def workflows(a: Node, b: Node, lab: Lab) -> tuple[str, list[str]]:
    running = a.start("snakemake", *call())
    met = until(lambda: trains(a), lambda: running.poll() is None)
    code, said = b.run("snakemake", *call())
    text, _ = running.communicate(timeout=LIMIT_S)
    wrong = [] if met else ["node a had no training"]
    wrong += [] if code != 0 and "Snakemake is running in this folder: process" in said else [f"b ends with {code}"]
    wrong += [] if running.returncode == 0 else [f"a ends with {running.returncode}: {text[-1500:]}"]
    return spoken(said, "running in this folder"), wrong or differences(b.project, lab)


def a_killed_workflow(a: Node, b: Node, lab: Lab) -> tuple[str, list[str]]:
    """Node a trains and loses its power; node b is told, takes off the lock, and goes on."""
    running = a.start("snakemake", *call())
    met = until(lambda: trains(a), lambda: running.poll() is None)
    everything_killed(running)
    first, said = b.run("snakemake", *call())
    unlocked, _ = b.run("snakemake", *call("--unlock"))
    last, text = b.run("snakemake", *call())
    wrong = [] if met else ["node a had no training"]
    wrong += [] if first != 0 and "may still be running in this folder: process" in said else [f"b ends with {first}"]
    wrong += [] if (unlocked, last) == (0, 0) else [f"b ends with {unlocked}, {last}: {text[-1500:]}"]
    return spoken(said, "running in this folder"), wrong or differences(b.project, lab)


def launchers(a: Node, b: Node, lab: Lab) -> tuple[str, list[str]]:
    """Both nodes launch one run: who comes second is told of the first one, and trains nothing."""
    run = next(name.removeprefix("steps of ") for name in lab.expected if re.match(r"steps of packed-.*-w2-", name))
    first = a.start("tokenscale", "launch", run)
    met = until(lambda: trains(a), lambda: first.poll() is None)
    second, said = b.run("tokenscale", "launch", run)
    text, _ = first.communicate(timeout=LIMIT_S)
    attempts = sorted(p.name for p in b.project.root.glob(f"results/runs/{run}/attempt=*"))
    wrong = [] if met else ["node a had no training"]
    wrong += [] if "is being written by" in said and f" on {a.name}" in said else [f"b ends with {second}: {said}"]
    wrong += [] if first.returncode == 0 else [f"a ends with {first.returncode}: {text[-1500:]}"]
    wrong += [] if attempts == ["attempt=00"] else [f"attempts: {attempts}"]
    return spoken(said, "being written by"), wrong


def builders(a: Node, b: Node, lab: Lab) -> tuple[str, list[str]]:
    jobs = [json.loads(path.read_text()) for path in (lab.folder / "jobs/runs").iterdir() if path.name.isdigit()]
    (arguments,) = [job for job in jobs if job[0] == "pretokenize" and any(word.startswith("padded") for word in job)]
    processes = [node.start("tokenscale", *arguments) for node in (a, b)]
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    wrong = [] if codes == [0, 0] else [f"both end with {codes}: {texts}"]
    wrong += [] if any("is being written by" in text for text in texts) else ["they did not meet"]
    store = next(p for p in a.project.root.glob("results/tokens/*/*/padded*"))
    for path in sorted(p for p in store.rglob("*") if p.is_file() and p.name not in ("build.json", ".lock")):
        inside = path.relative_to(a.project.root)
        if path.read_bytes() != (lab.folder / "end/project" / inside).read_bytes():
            wrong.append(f"differs: {inside}")
    return " | ".join(spoken(text, "being written by") for text in texts), wrong


SCENES: tuple[tuple[str, str, Callable[[Node, Node, Lab], tuple[str, list[str]]]], ...] = (
    ("two workflows in one folder", "runs", workflows),
    ("a workflow whose node is gone", "runs", a_killed_workflow),
    ("two launchers of one run", "runs", launchers),
    ("two builders of one store", "tokens", builders),
)


def trains(node: Node) -> bool:
    return any(node.project.root.glob("results/runs/*/attempt=*/rank=*/steps.jsonl"))


def spoken(text: str, words: str) -> str:
    return next((line.strip() for line in text.splitlines() if words in line), "")


def everything_killed(process: subprocess.Popen) -> None:
    families: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        families.setdefault(int(fields[1]), []).append(int(status.parent.name))
    doomed = [process.pid]
    for number in doomed:
        doomed += families.get(number, [])
    for number in doomed:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="MOUNT_A")
    parser.add_argument("b", type=Path, metavar="MOUNT_B")
    parser.add_argument("log", type=Path)
    parser.add_argument("--folder", type=Path, help="of a campaign's workflow, already built (campaign.py)")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shared-") as temporary:
        lab = Lab((asked.folder or Path(temporary)) / "lab")
        lab.made()
        kind = subprocess.run(
            ["findmnt", "-no", "FSTYPE", "-T", asked.a], capture_output=True, text=True
        ).stdout.strip()
        for scene, stage, play in SCENES:
            own = Path(tempfile.mkdtemp(prefix="tokenscale-", dir=asked.a))
            project = copy_of(Project(lab.folder / stage / "project"), own)
            (project.root / ".snakemake/tokenscale.owners").unlink(missing_ok=True)  # the lab's own
            said, lost = play(Node("node-a", own), Node("node-b", asked.b / own.name), lab)
            rows.append({"scene": scene, "file_system": kind, "said": said, "lost": lost})
            print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(own)
    asked.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raise SystemExit(any(row["lost"] for row in rows))


if __name__ == "__main__":
    main()
