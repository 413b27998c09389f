"""Attempts of a run, its ranks as processes, and the state of another run that it goes on from."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json, write_sealed
from tokenscale.runs.launch import ranks
from tokenscale.runs.launch.attempts import (
    describe_saved_state,
    hash_identity,
    prepare_attempt,
    write_done_file,
)
from tokenscale.runs.launch.ranks import run_ranks
from tokenscale.runs.launch.start import open_run
from tokenscale.runs.records import provenance
from tokenscale.settings.run import RunSettings, state_path


@pytest.fixture
def place(tmp_path):
    code = tmp_path / "code.py"
    manifest = tmp_path / "manifest.json"
    code.write_text("x = 1\n")
    manifest.write_text("{}")
    return tmp_path / "run", code, manifest


def attempt(place):
    """(identity of what is there now, number of the attempt that is made of it)."""
    identity = hash_identity([place[1]], {"store": place[2]})
    return identity, prepare_attempt(place[0], RunSettings(), identity)


def is_done(directory, identity):
    return write_done_file(directory, directory / "done.json", identity, RunSettings())


def train(directory, attempt, identity, status="complete"):
    record = provenance.start_record(directory, {"attempt": attempt, "digest": identity.digest})
    provenance.seal_record(directory, record, {"status": status, "steps": 3})


@pytest.mark.parametrize("status", ["complete", "nonfinite"])
def test_a_run_that_ended_is_not_trained_again_and_an_unfinished_attempt_is_followed_by_the_next(
    place, status
):
    for number in range(3):
        identity, found = attempt(place)
        assert found == number and not is_done(place[0], identity)
    train(place[0], 2, identity, status)
    assert attempt(place)[1] is None and is_done(place[0], identity)
    assert read_json(place[0] / "done.json")["status"] == status


@pytest.mark.parametrize("changed", [1, 2], ids=["code", "manifest"])
def test_attempts_of_other_code_or_data_are_set_aside_under_a_new_number(place, changed):
    directory = place[0]
    (directory / "superseded/004").mkdir(parents=True)
    identity, _ = attempt(place)
    train(directory, 0, identity)
    place[changed].write_text("y = 2\n")
    other, number = attempt(place)
    assert (
        number == 0
        and read_json(directory / "superseded/005/run.json")["digest"] == identity.digest
    )
    assert not (directory / "run.json").exists() and not is_done(directory, other)


def test_an_edited_record_is_not_sealed_and_moving_the_project_keeps_the_digest(place, tmp_path):
    directory, code, manifest = place
    identity, _ = attempt(place)
    train(directory, 0, identity)
    record = read_json(directory / "run.json")
    write_json(directory / "run.json", record | {"attempt": 9})
    assert provenance.read_sealed(directory / "run.json") is None and not is_done(
        directory, identity
    )
    assert identity.digest == identity.code_and_inputs and "state" not in identity.record(), (
        "it resumes from none"
    )
    (tmp_path / "elsewhere").mkdir()
    moved = code.rename(tmp_path / "elsewhere/code.py")
    assert hash_identity([moved], {"store": manifest}).digest == identity.digest


@pytest.mark.parametrize(
    ("ranks", "last_one", "code", "words"),
    [
        (3, "sys.exit(7)", 7, ["(exit code 7)"]),
        (
            3,
            "os.kill(os.getpid(), 9)",
            137,
            ["(signal SIGKILL)", "because main memory was full\n  next    `dm"],
        ),
        (
            1,
            "os.kill(os.getpid(), 9)",
            137,
            ["(signal SIGKILL)", "  cause   a process was killed without a message"],
        ),
    ],
)
def test_the_first_failed_rank_is_named_with_the_most_likely_cause_and_the_others_are_ended(
    capfd, ranks, last_one, code, words
):
    script = (
        f"import os, sys, time\nif os.environ.get('RANK', '0') == '{ranks - 1}': "
        f"{last_one}\ntime.sleep(60)"
    )
    assert run_ranks([sys.executable, "-c", script], ranks) == code
    said = capfd.readouterr().err
    assert (
        f"rank {ranks - 1} failed first {words[0]}; ending {ranks - 1} other" in said
        and words[-1] in said
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_get_the_environment_of_torchrun_and_nothing_that_another_launcher_left(
    capfd, monkeypatch, world_size
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MKL_NUM_THREADS", "64")  # as Snakemake does
    script = (
        "import os; e = os.environ; assert int(e['MKL_NUM_THREADS']) < 64 and "
        "e.get('LOCAL_RANK') != '3';"
        # one write: unbuffered prints of two ranks would mix
        "os.write(1, f\"I am {e.get('RANK')} of {e.get('WORLD_SIZE')} "
        "{e.get('MASTER_ADDR')}\\n\".encode())"
    )
    assert run_ranks([sys.executable, "-c", script], world_size) == 0
    said = sorted(capfd.readouterr().out.splitlines())
    alone = ["I am None of None None"]
    assert said == (
        alone if world_size == 1 else [f"I am {rank} of 2 127.0.0.1" for rank in (0, 1)]
    )


@pytest.mark.parametrize(
    "stated, world_size, expected",
    [(None, 1, 8), (None, 2, 4), ("8", 2, 4), ("4", 4, 1), ("1", 2, 1), ("64", 2, 4)],
)
def test_ranks_share_the_threads_of_the_job(monkeypatch, stated, world_size, expected):
    """Snakemake sets OMP_NUM_THREADS for the whole job; each rank taking all of them is the
    mistake.
    """
    monkeypatch.setattr(ranks, "count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert ranks.threads_per_rank(world_size) == expected


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("auto", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cpu", {}, {}),
        ("auto", {"PYTORCH_ALLOC_CONF": "own"}, {"PYTORCH_ALLOC_CONF": "own"}),
        ("auto", {"PYTORCH_CUDA_ALLOC_CONF": "own"}, {"PYTORCH_CUDA_ALLOC_CONF": "own"}),
    ],
)
def test_cuda_memory_grows_in_segments_unless_the_user_sets_its_allocator(
    monkeypatch, device, own, expected
):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    environment = ranks.rank_environment(threads=1, device=device)
    assert {name: environment[name] for name in names if name in environment} == expected


def test_a_launcher_that_is_told_to_end_ends_its_ranks(tmp_path):
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


WRITER = "packed-llama-micro-single-w1-0123456789"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that goes on from a state whose record is there."""
    monkeypatch.chdir(tmp_path)
    where = state_path(WRITER, 8)
    write_sealed(tmp_path / where / "checkpoint.json", {"step": 8})
    return RunSettings(resume_from=where)


def sealed(run, directory):
    with open_run(run, directory / "done.json", {}) as (identity, attempt, _):
        train(directory, attempt, identity)
        return identity


def test_a_run_of_the_same_state_is_not_trained_again_and_one_of_another_state_is(run, tmp_path):
    directory = tmp_path / "results/runs/later"
    first = sealed(run, directory)
    assert read_json(directory / "attempt=00/attempt.json")["state"] == first.state
    with open_run(run, directory / "done.json", {}) as (same, attempt, _):
        assert attempt is None and same == first
    write_sealed(tmp_path / run.resume_from / "checkpoint.json", {"step": 8, "ranks": "others"})
    with open_run(run, directory / "done.json", {}) as (other, attempt, _):
        assert attempt == 0 and other.digest != first.digest
        assert other.code_and_inputs == first.code_and_inputs, "what repeats share is the same"
    assert (directory / "superseded/000/attempt=00").is_dir()


def test_a_state_that_was_purged_is_told_with_what_makes_it_again(run, tmp_path):
    shutil.rmtree(tmp_path / run.resume_from)
    with (
        pytest.raises(UserError) as caught,
        open_run(run, tmp_path / "results/runs/later/done.json", {}),
    ):
        pass
    assert f"rm -r results/runs/{WRITER}, and snakemake results/runs/{WRITER}/done.json" in str(
        caught.value
    )
    with (
        pytest.raises(UserError, match="existing state"),
        open_run(
            replace(run, resume_from="elsewhere/step=00000008"), tmp_path / "run/done.json", {}
        ),
    ):
        pass


@pytest.mark.parametrize(
    "saved, words",
    [
        ([], "no state"),
        (["step=00000004", "step=00000012", "final"], "step 12"),
        (["step=7.partial"], "no state"),
    ],
)
def test_a_run_that_was_ended_at_once_tells_its_saved_state(tmp_path, saved, words):
    for name in saved:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "checkpoint.json").touch()
    assert words in describe_saved_state(tmp_path)


START_TRUE = """
from tokenscale.base.errors import UserError
from tokenscale.runs.launch.ranks import run_ranks
try:
    print(run_ranks(["true"], {size}))
except UserError as error:
    print(error)
"""


def start_limited(limit, size):
    """Start ranks in a shell behind `limit`, a command; return what is printed."""
    argv = ["sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable, "-c"]
    return subprocess.check_output([*argv, START_TRUE.format(size=size)], text=True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_may_open_too_few_files_do_not_start(size):
    """The limit that the message names is enough."""
    refused = start_limited("ulimit -Sn 40", size)
    assert f"at least {64 + 8 * size} for {size} ranks" in refused
    following = re.search(r"next +(ulimit -n \d+), or run one rank", refused)[1]
    assert start_limited(following, size) == "0\n"
    assert "ulimit -n" not in start_limited("ulimit -n 40", size).partition("next ")[2]
    assert start_limited("ulimit -n 40", 1) == "0\n"
