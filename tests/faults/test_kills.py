"""A kill of every rule, and of Snakemake: the next call ends well, and holds what an undisturbed
build holds.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import kills
from tests.faults.kills import END_S, SIGNALS, VICTIMS, WHOLE, call, drawn, lies_in
from tests.web import Server
from tests.workflow import forked
from tests.workflow.conftest import Project, copy_of

pytestmark = pytest.mark.slow(20)

#: one project after another, in the order in which a workflow comes to them: those of one rule run
#: side by side, and one that had ended before its neighbour was killed is not met again
CHAINS = {
    "a": (
        "corpus",
        "tokenizer",
        "format packed",
        "launcher",
        "one of the ranks",
        "ingest",
        "claims",
        "figure",
        "page",
        "PDF",
        "bundle",
    ),
    "b": ("everything", "format padded", "one of the ranks", "Snakemake"),
}
#: in which stage Snakemake is killed, alone or with all its jobs
STAGE_OF_WHOLE = {"everything": "tokens", "Snakemake": "tables"}
#: share of a victim's usual time: one that ends before its signal costs the rest of a workflow.
#: Campaigns kill later, and also the third format
LATEST = 0.6


@pytest.mark.parametrize("name", [pytest.param("a", marks=pytest.mark.long), "b"])
def test_the_last_call_makes_what_an_undisturbed_one_makes(stages, name, tmp_path):
    """Each call is killed, at a moment drawn at random, by the next of the signals, until no steps
    are left to kill.
    """
    each = [*VICTIMS, *WHOLE]
    seed = [*CHAINS].index(name)
    planned = []
    for place, victim in enumerate(CHAINS[name]):
        turn = (place + seed) % len(SIGNALS)
        kill = drawn(each.index(victim) + len(each) * turn, seed)
        assert (kill.victim, kill.signal) == (victim, SIGNALS[turn])
        planned.append(
            replace(kill, stage=STAGE_OF_WHOLE.get(victim, kill.stage), moment=LATEST * kill.moment)
        )
    lost = kills.chain(stages, planned, tmp_path / "chain", seed)
    assert not lost, json.dumps(lost, indent=1).replace("\\n", "\n")


def test_a_second_call_ends_at_once_and_a_dry_run_shows_its_plan(stages, tmp_path):
    """The second names the first, which ends as if there had been no other."""
    project = copy_of(Project(stages.folder / "tokens/project"), kills.empty(tmp_path / "own"))
    with kills.jobs_of(tmp_path / "jobs") as jobs:
        variables = kills.environment(project, jobs)
        first = forked.Started(call(), project.root, variables)
        assert kills.until(lambda: kills.left(jobs), lambda: first.alive)
        code, said = forked.snakemake(call(), project.root, variables)
        assert code == 2 and first.alive, said
        assert (
            "running in this folder" in said
            and f"process {first.pid} on" in said
            and said.count("\n") < 8
        ), said
        code, said = forked.snakemake(call("-n"), project.root, variables)
        assert code == 0 and "would run." in said and "Error" not in said, said
        assert first.alive and first.wait()[0] == 0
    assert kills.differences(lies_in(project.root), stages) == []


def test_a_loss_of_each_kind_is_seen(stages, tmp_path):
    whole = lies_in(stages.folder / "end/project")
    assert whole == stages.expected
    copy = tmp_path / "copy"
    shutil.copytree(stages.folder / "end/project/results", copy / "results", symlinks=True)
    shard = next((copy / "results/tokens").rglob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    steps = next((copy / "results/runs").glob("*/attempt=*/rank=*/steps.jsonl"))
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    next((copy / "results/runs").rglob("final/*.safetensors")).write_bytes(b"")
    (copy / "results/report/.index.html.node-7.tmp").write_text("half")
    (copy / "results/report/report.pdf").unlink()
    found = lies_in(copy)
    changed = {name for name in whole if name in found and found[name] != whole[name]}
    assert {name.split("/")[0].split(" of ")[0] for name in changed} == {"tokens", "steps", "runs"}
    assert found.keys() - whole.keys() == {"report/.index.html.node-7.tmp"}
    assert whole.keys() - found.keys() == {"report/report.pdf"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("SIGKILL", "SIGTERM") else pytest.mark.long)
        for name in SIGNALS
    ],
)
def test_a_plain_call_completes_what_a_killed_download_began(name, tmp_path):
    """Each file comes in halves with a pause between them, in which most of the signals arrive."""
    files = {
        f"/{number}.jsonl": b"".join(b'{"text": "%d %d"}\n' % (number, n) for n in range(9999))
        for number in range(3)
    }
    pick = random.Random(name)
    with Server() as web:
        web.files |= files
        addresses = [web.address + path for path in files]
        settings = {"name": "x", "source": {"kind": "url", "files": addresses}}
        words = ["download", "--settings", json.dumps(settings), "--output", "x/manifest.json"]

        def start(folder: Path) -> subprocess.Popen[str]:
            web.requests.clear()
            folder.mkdir(exist_ok=True)
            argv = [sys.executable, "-m", "tokenscale", *words]
            return subprocess.Popen(
                argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        def complete(folder: Path) -> dict[str, bytes]:
            process = start(folder)
            said, _ = process.communicate(timeout=END_S)
            assert process.returncode == 0, said
            assert not [*folder.rglob(".tokenscale-*"), *folder.rglob("*.part*")]
            found = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            return {name: found[name] for name in found if name not in (".lock", "build.json")}

        expected = complete(tmp_path / "whole")
        for moment in range(2):
            folder = tmp_path / str(moment)
            web.silent = {path: [len(content) // 2] for path, content in files.items()}
            web.silent_s = 0.5
            process = start(folder)
            alive = lambda process=process: process.poll() is None  # noqa: E731
            assert kills.until(lambda: web.requests, alive)
            time.sleep(3 * web.silent_s * pick.random())
            assert alive()
            process.send_signal(getattr(signal, name))
            if name == "SIGSTOP":
                time.sleep(pick.random())
                process.send_signal(pick.choice([signal.SIGCONT, signal.SIGKILL]))
            process.communicate(timeout=END_S)
            assert complete(folder) == expected
