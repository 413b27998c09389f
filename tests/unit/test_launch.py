import os
import subprocess
import sys
import time

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder, read_json, write_json
from tokenscale.runs.launch import ranks
from tokenscale.runs.launch.attempts import hash_identity, prepare_attempt, write_done_file
from tokenscale.runs.launch.ranks import run_ranks
from tokenscale.runs.records import provenance
from tokenscale.settings.layout import geometry
from tokenscale.settings.run import RunSettings


@pytest.mark.parametrize(
    "world_size, nodes, ranks", [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4), (12, 3, 4), (16, 4, 4)]
)
def test_golden_geometry(world_size, nodes, ranks):
    found = geometry(world_size, 4)
    assert (found.nodes, found.ranks_per_node) == (nodes, ranks)


@pytest.mark.parametrize("world_size", [5, 7, 11, 13])
def test_a_world_that_does_not_fill_its_nodes_is_refused(world_size):
    with pytest.raises(UserError, match="use"):
        geometry(world_size, 4)
    assert geometry(world_size, None).nodes == 1


@pytest.fixture
def place(tmp_path):
    code, manifest = tmp_path / "code.py", tmp_path / "manifest.json"
    code.write_text("x = 1\n")
    manifest.write_text("{}")
    return tmp_path / "run", code, manifest


def train(directory, attempt, identity, status="complete"):
    record = provenance.start_record(directory, {"attempt": attempt, "digest": identity.digest})
    provenance.seal_record(directory, record, {"status": status, "steps": 3})


def test_a_complete_run_is_not_trained_again(place):
    directory, code, manifest = place
    identity = hash_identity([code], {"store": manifest})
    assert prepare_attempt(directory, RunSettings(), identity) == 0
    train(directory, 0, identity)
    assert prepare_attempt(directory, RunSettings(), identity) is None
    assert write_done_file(directory, directory / "done.json", identity, RunSettings())
    assert read_json(directory / "done.json")["status"] == "complete"


def test_an_unfinished_attempt_is_followed_by_the_next(place):
    directory, code, manifest = place
    identity = hash_identity([code], {"store": manifest})
    assert [prepare_attempt(directory, RunSettings(), identity) for _ in range(3)] == [0, 1, 2]
    assert not write_done_file(directory, directory / "done.json", identity, RunSettings())


@pytest.mark.parametrize("changed", ["code", "manifest"])
def test_attempts_of_other_code_or_data_are_set_aside(place, changed):
    directory, code, manifest = place
    identity = hash_identity([code], {"store": manifest})
    prepare_attempt(directory, RunSettings(), identity)
    train(directory, 0, identity)
    {"code": code, "manifest": manifest}[changed].write_text("y = 2\n")
    other = hash_identity([code], {"store": manifest})
    assert prepare_attempt(directory, RunSettings(), other) == 0
    assert read_json(directory / "superseded/000/run.json")["digest"] == identity.digest
    assert not (directory / "run.json").exists()
    assert not write_done_file(directory, directory / "done.json", other, RunSettings())


def test_an_edited_record_is_not_sealed(place):
    directory, code, manifest = place
    identity = hash_identity([code], {"store": manifest})
    prepare_attempt(directory, RunSettings(), identity)
    train(directory, 0, identity)
    record = read_json(directory / "run.json")
    write_json(directory / "run.json", record | {"attempt": 9})
    assert provenance.read_sealed(directory / "run.json") is None
    assert not write_done_file(directory, directory / "done.json", identity, RunSettings())


def test_moving_the_project_keeps_the_digest(place, tmp_path):
    _, code, manifest = place
    before = hash_identity([code], {"store": manifest}).digest
    (tmp_path / "elsewhere").mkdir()
    assert hash_identity([code.rename(tmp_path / "elsewhere/code.py")], {"store": manifest}).digest == before


def test_the_first_failed_rank_is_named_and_the_others_are_ended(capfd):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
    assert run_ranks([sys.executable, "-c", script], 3) == 7
    assert "rank 1 failed first (exit code 7); ending 2 other" in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_that_is_killed_is_named_with_the_most_likely_cause(capfd, ranks):
    """It could say nothing itself, and the kernel's out-of-memory killer tells only its log."""
    script = (
        f"import os, time\nif os.environ.get('RANK', '0') == '{ranks - 1}': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    assert run_ranks([sys.executable, "-c", script], ranks) == 128 + 9
    said = capfd.readouterr().err
    assert f"rank {ranks - 1} failed first (signal SIGKILL); ending {ranks - 1} other" in said
    assert (
        "  cause   a process was killed without a message, most often because main memory was full\n  next    `dm"
        in said
    )


def test_ranks_get_the_environment_of_torchrun(capfd, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "64")  # as Snakemake does
    script = (
        "import os; e = os.environ; assert int(e['MKL_NUM_THREADS']) < 64;"
        # one write: unbuffered prints of two ranks would mix
        "os.write(1, f\"I am {e['RANK']} of {e['WORLD_SIZE']} {e['MASTER_ADDR']}\\n\".encode())"
    )
    assert run_ranks([sys.executable, "-c", script], 2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["I am 0 of 2 127.0.0.1", "I am 1 of 2 127.0.0.1"]


@pytest.mark.parametrize(
    "stated, world_size, expected", [(None, 1, 8), (None, 2, 4), ("8", 2, 4), ("4", 4, 1), ("1", 2, 1), ("64", 2, 4)]
)
def test_ranks_share_the_threads_of_the_job(monkeypatch, stated, world_size, expected):
    """Snakemake sets OMP_NUM_THREADS for the whole job; each rank taking all of them is the mistake."""
    monkeypatch.setattr(ranks, "count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert ranks.threads_per_rank(world_size) == expected


def test_a_launcher_that_is_told_to_end_ends_its_ranks(tmp_path):
    """Ranks that outlive their launcher go on writing beside the next attempt."""
    write = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    rank = f"import os, time; {write}; time.sleep(99)"
    call = f"sys.exit(run_ranks([sys.executable, '-c', {rank!r}], 2))"
    code = f"import sys; from tokenscale.runs.launch.ranks import run_ranks; {call}"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
        time.sleep(0.05)
    launcher.terminate()
    assert launcher.wait(30) == 143
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_a_folder_has_one_writer(tmp_path):
    with lock_folder(tmp_path, "run x"), pytest.raises(UserError, match="another process") as error:
        with lock_folder(tmp_path, "run x"):
            pass
    assert str(os.getpid()) in str(error.value)
    with lock_folder(tmp_path, "run x"):
        pass


def test_superseded_numbers_are_not_reused(place):
    directory, code, manifest = place
    (directory / "superseded/004").mkdir(parents=True)
    for text in ("a = 1", "b = 2"):
        code.write_text(text)
        prepare_attempt(directory, RunSettings(), hash_identity([code], {"store": manifest}))
    assert (directory / "superseded/005").is_dir()


def test_a_run_that_diverged_is_not_trained_again(place):
    directory, code, manifest = place
    identity = hash_identity([code], {"store": manifest})
    prepare_attempt(directory, RunSettings(), identity)
    train(directory, 0, identity, status="nonfinite")
    assert prepare_attempt(directory, RunSettings(), identity) is None
    assert write_done_file(directory, directory / "done.json", identity, RunSettings())
    assert read_json(directory / "done.json")["status"] == "nonfinite"


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_do_not_see_what_another_launcher_left(monkeypatch, world_size):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    code = f"import os; assert os.environ.get('WORLD_SIZE', '1') == '{world_size}' and os.environ.get('RANK') != '3'"
    assert run_ranks([sys.executable, "-c", code], world_size) == 0
