"""Another process has the port on which ranks were to meet: between its choice and their start seconds pass."""

import json
import socket

import pytest

from tests.faults.test_resume import lab, run_of, series, start  # noqa: F401
from tokenscale.runs.launch import ranks
from tokenscale.runs.launch.start import start_run as launch
from tokenscale.settings.run import CheckpointSettings, ValidationSettings


@pytest.fixture
def taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def manifests(lab):  # noqa: F811
    return lambda run: {"store": lab.store(run.store) / "manifest.json"}


def test_ranks_meet_elsewhere_and_where_they_cannot_the_next_call_trains(
    lab,  # noqa: F811
    tmp_path,
    monkeypatch,
    capfd,
    taken,
    manifests,
):
    run = run_of(world_size=2, device="cpu", validation=ValidationSettings(rows=0), checkpoints=CheckpointSettings())
    folder, free, said = tmp_path / run.identity, ranks.free_port, "another process has the port on which the ranks"
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "free_port", lambda: taken)
        patch.setattr(ranks, "PORTS_TRIED", 1)
        assert launch(run, folder / "done.json", manifests(run)) == ranks.PORT_TAKEN
    heard = capfd.readouterr().err
    assert said in heard and f"127.0.0.1:{taken}" in heard and "  next  start it again" in heard
    assert "Traceback" not in heard and not (folder / "done.json").exists()
    ports = [taken]
    monkeypatch.setattr(ranks, "free_port", lambda: ports.pop() if ports else free())
    assert launch(run, folder / "done.json", manifests(run)) == 0
    heard = capfd.readouterr().err
    assert heard.count(said) == 1 and "Traceback" not in heard
    assert sorted(path.name for path in folder.glob("attempt=*")) == ["attempt=00", "attempt=01"]
    assert json.loads((folder / "done.json").read_text())["status"] == "complete"
    start(run, lab.inputs(run), tmp_path / "whole")
    assert series(folder) == series(tmp_path / "whole")
