"""Ports: nobody outside a machine reaches the ranks of a run there; a port that is taken is not the
last one.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.test_resume import run_of
from tokenscale.runs.launch import ranks
from tokenscale.runs.launch.start import start_run
from tokenscale.settings.run import CheckpointSettings, ValidationSettings

#: what /proc/net/tcp and tcp6 say of a socket that listens on a loopback address
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
LISTENS = "0A"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
#: joins as a rank does, and sums once
JOINER = """
import sys, torch, torch.distributed as dist
from tokenscale.train.parallel.world import join
world = join(2, "cpu")
assert world.sum(1) == [2.0]
print("joined", flush=True)
world.close()
"""


def listening(process: int) -> list[str]:
    """The addresses other than loopback on which a process and those that it started listen."""
    found = []
    processes = [process]
    while processes:
        pid = processes.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                processes += map(int, (task / "children").read_text().split())
            inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:  # it has ended meanwhile
            continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                    address, _, port = fields[1].partition(":")
                    found.append((f"process {pid} {address}", int(port, 16)))
    return [f"{where}:{port}" for where, port in found if where.split()[-1] not in LOOPBACK] + (
        [""] if found else []
    )


def watched(argv: list[str], folder: Path, **variables: str) -> tuple[set[str], str]:
    """What such processes listened on while they ran, and what they printed."""
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )
        seen: set[str] = set()
        while process.poll() is None:
            seen |= set(listening(process.pid))
            time.sleep(0.2)
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text
    return seen, text


@pytest.mark.parametrize("starter", ["here", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_ranks_of_a_run_listen_on_the_loopback_interface_alone(lab, tmp_path, starter):
    run = run_of(
        world_size=2,
        device="cpu",
        validation=ValidationSettings(rows=0),
        checkpoints=CheckpointSettings(),
    )
    manifest = lab.store(run.store) / "manifest.json"
    code = f"""
from pathlib import Path
from tokenscale.runs.launch.start import start_run
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings
run = RunSettings.from_json({run.to_json()!r})
done = Path({str(tmp_path)!r}, run.identity, "done.json")
raise SystemExit(start_run(run, done, {{"store": Path({str(manifest)!r})}}, machine=Machine(starter={starter!r})))
"""
    seen, text = watched([sys.executable, "-c", code], tmp_path)
    assert seen == {""}, text  # they listen, but nowhere else


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.long),
        ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"],
    ],
)
def test_ranks_that_a_user_starts_by_torchrun_open_no_port_of_their_own(tmp_path, options):
    """torchrun itself listens on every interface, unless its rendezvous is a file
    (docs/clusters.md).
    """
    (tmp_path / "joiner.py").write_text(JOINER)
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if options else {}
    options = options or [f"--master-port={ranks.free_port()}"]
    argv = [sys.executable, *TORCHRUN, *options, str(tmp_path / "joiner.py")]
    seen, text = watched(argv, tmp_path, **variables)
    assert text.count("joined") == 2
    assert len({where.split()[1] for where in seen if where}) == (0 if variables else 1), seen


def test_ranks_meet_elsewhere_and_where_they_cannot_the_next_call_trains(
    lab, tmp_path, monkeypatch, capfd
):
    """Between the choice of a port and the start of the ranks seconds pass."""
    run = run_of(
        world_size=2,
        device="cpu",
        validation=ValidationSettings(rows=0),
        checkpoints=CheckpointSettings(),
    )
    manifests = {"store": lab.store(run.store) / "manifest.json"}
    folder = tmp_path / run.identity
    free = ranks.free_port
    said = "another process has the port on which the ranks"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "free_port", lambda: taken)
            patch.setattr(ranks, "PORTS_TRIED", 1)
            assert start_run(run, folder / "done.json", manifests) == ranks.PORT_TAKEN
        heard = capfd.readouterr().err
        assert said in heard and f"127.0.0.1:{taken}" in heard and "  next  start it again" in heard
        assert "Traceback" not in heard and not (folder / "done.json").exists()
        ports = [taken]
        monkeypatch.setattr(ranks, "free_port", lambda: ports.pop() if ports else free())
        assert start_run(run, folder / "done.json", manifests) == 0
    heard = capfd.readouterr().err
    assert heard.count(said) == 1 and "Traceback" not in heard
    assert sorted(path.name for path in folder.glob("attempt=*")) == ["attempt=00", "attempt=01"]
    assert json.loads((folder / "done.json").read_text())["status"] == "complete"
