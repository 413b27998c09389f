"""The clock is set back: files of a time to come are put right before Snakemake sees them, their order kept."""

import os
import time

from tokenscale.runs.launch import clock, workflow_lock


def written(path, seconds_to_come: float):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, ns=(time.time_ns() + round(seconds_to_come * 1e9),) * 2)
    return path


def test_what_was_newer_stays_newer_and_what_was_as_old_stays_so(tmp_path):
    results, far = tmp_path / "results", tmp_path / "scratch"
    times = {"old": -50.0, "corpus/manifest": 3600.0, "tokens/a": 3601.0, "report": 3700.0}
    paths = [written(results / name, seconds) for name, seconds in times.items()]
    twin = written(results / "tokens/b", 0)
    os.utime(twin, ns=(paths[2].stat().st_mtime_ns,) * 2)
    linked = written(far / "shard", 3600.5)
    (results / "far").symlink_to(far)
    assert clock.repair_future_times(results) == 5
    order = [path.stat().st_mtime_ns for path in (paths[0], paths[1], linked, paths[2], paths[3])]
    assert order == sorted(set(order)) and order[-1] < time.time_ns()
    assert twin.stat().st_mtime_ns == paths[2].stat().st_mtime_ns
    assert abs(time.time() - 50 - paths[0].stat().st_mtime) < 20, "what has been is not touched"


def test_it_is_done_once_by_who_begins_a_workflow_and_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workflow_lock, "_held", [])
    monkeypatch.setattr(workflow_lock.atexit, "register", lambda *given: None)
    ahead = written(tmp_path / "results/tokens/manifest.json", 1000)
    written(tmp_path / ".snakemake/tokenscale.owners", -5)
    workflow_lock.enter_workflow(["all"], tmp_path / ".snakemake", tmp_path / "results")
    assert not capsys.readouterr().err and ahead.stat().st_mtime > time.time(), "the clock did not go back: no walk"
    for file in workflow_lock._held:
        file.close()
    workflow_lock._held.clear()
    written(tmp_path / ".snakemake/tokenscale.owners", 900)
    workflow_lock.enter_workflow(["all"], tmp_path / ".snakemake", tmp_path / "results")
    assert "set back by 900 s or more since the last call; 1 files of a time to come" in capsys.readouterr().err
    assert ahead.stat().st_mtime <= time.time()
    assert clock.measure_setback(tmp_path / ".snakemake/tokenscale.owners") is None, "told once"
    workflow_lock._held.pop().close()
