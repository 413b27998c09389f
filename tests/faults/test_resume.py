"""A run that is killed goes on where it was: the same losses to the last bit, the same samples at
any world size.
"""

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import tokenscale
from tests import served
from tests.corpora import small_run
from tests.distributed.ranks import run_ranks, train_rank
from tests.logs import read_steps, series
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, write_json, write_sealed
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train import resume, trainer
from tokenscale.train.checkpoint import Checkpoint, Piece, State, commit, read_model
from tokenscale.train.loop import Training, train
from tokenscale.train.parallel.world import World
from tokenscale.train.resume import Checkpoints

STEPS = 12
ALONE = World(0, 1, 0, torch.device("cpu"))


def run_of(approach="packed", world_size=1, **changes) -> RunSettings:
    own = {
        "validation": ValidationSettings(rows=4, every=6),
        "checkpoints": CheckpointSettings(every=3, keep_last=2),
    }
    return small_run(approach, world_size, STEPS, **own | changes)


def start(run, inputs, directory, attempt=0):
    if run.layout.world_size == 1:
        train(run, inputs, directory, ALONE, attempt)
    else:
        run_ranks(train_rank, run.layout.world_size, run, inputs, directory, attempt)


class Killed(BaseException):
    """In place of a signal, where the process is that of the tests."""


def interrupted(run, inputs, directory, at: int, attempt: int = 0) -> None:
    """One process, cut off after step `at`, its checkpoint threads with it."""
    training = Training(run, inputs, directory, ALONE, attempt)
    step = training.step

    def cut():
        if training.done == at:
            raise Killed
        return step()

    training.step = cut
    with pytest.raises(Killed):
        training.run()
    training.checkpoints.wait()
    training.writer.flush()


@pytest.fixture(scope="module")
def stopped(lab, tmp_path_factory) -> Path:
    """A run that was cut off after step 8: its states are of steps 3 and 6. Nobody may change
    it.
    """
    run = run_of()
    folder = tmp_path_factory.mktemp("stopped")
    interrupted(run, lab.inputs(run), folder, at=8)
    return folder


def checkpoints_of(folder: Path, digest="a", **asked) -> Checkpoints:
    """Checkpoints of a run without a training, written at once."""
    run = run_of(checkpoints=CheckpointSettings(asynchronous=False, **asked))
    return Checkpoints(run, folder, ALONE, {"digest": digest}, None)


def save_state(checkpoints: Checkpoints, step: int) -> None:
    facts = {"run_id": "tiny", "run": {}, "model": {}, "loss_scale": {}, "step": step}
    facts |= {"begins_at": 0, "budget": {"useful_tokens": step, "seconds": 1.0, "warm": 0.0}}
    state = State({"model.a": Piece.of(torch.full((9,), float(step)))})
    checkpoints.save(f"step={step:08d}", "resume", state, facts)


@pytest.fixture
def impatient(monkeypatch):
    """Files of a rank that do not come fail a test soon."""
    monkeypatch.setattr(resume, "commit", partial(commit, patience_s=1))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, []),
        ({"at_start": True}, [0]),
        ({"every": 5}, [5, 10]),
        ({"each_epoch": True}, [4, 8]),
        ({"each_epoch": True, "every": 5}, [4, 5, 8, 10]),
        ({"keep_resume_state": True}, [12]),
    ],
)
def test_states_are_due_when_they_are_asked_for(tmp_path, asked, expected):
    checkpoints = checkpoints_of(tmp_path, **asked)
    due = [
        done
        for done in range(STEPS + 1)
        if checkpoints.due(done, epoch_ended=done % 4 == 0, last=done == STEPS)
    ]
    assert due == expected


@pytest.mark.usefixtures("impatient")
def test_a_state_is_logged_with_its_bytes_and_seconds_and_only_the_newest_are_kept(tmp_path):
    checkpoints = checkpoints_of(tmp_path, keep_last=2)
    for step in (9, 10, 11):
        save_state(checkpoints, step)
    kept = sorted(checkpoints.folder.iterdir())
    assert [folder.name for folder in kept] == ["step=00000010", "step=00000011"]
    names, sizes, seconds = zip(*checkpoints.seconds, strict=True)
    assert names == ("step=00000009", *(folder.name for folder in kept))
    assert sizes[1:] == tuple(sum(f.stat().st_size for f in folder.iterdir()) for folder in kept)
    assert min(seconds) > 0 and max(seconds) < 60


@pytest.mark.usefixtures("impatient")
def test_the_newest_state_of_this_code_is_chosen_and_damaged_ones_are_put_aside(tmp_path, capsys):
    for step, digest in ((1, "a"), (2, "a"), (3, "b"), (4, "a")):
        save_state(checkpoints_of(tmp_path, digest, keep_last=9), step)
    events = tmp_path / "attempt=00/rank=00000/events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"event":"checkpoint","status":"step=00000004"}\n')
    newest = tmp_path / "checkpoints/step=00000004"
    (newest / "rank=00000.safetensors").write_bytes(b"")
    damaged = newest.with_name(newest.name + ".damaged")
    shutil.copytree(newest, damaged / "of an earlier attempt")
    assert checkpoints_of(tmp_path).newest().folder.name == "step=00000002"
    assert not newest.exists() and (damaged / "rank=00000.safetensors").is_file()
    told = capsys.readouterr().out
    assert f"put aside as {damaged.name}" in told and "is missing" not in told
    assert checkpoints_of(tmp_path, "c").newest() is None


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TimeoutError("a rank failed"), TimeoutError),
        (OSError("full"), UserError),
        (SafetensorError("full"), UserError),
    ],
)
def test_a_checkpoint_that_is_not_written_is_one_message_but_for_another_ranks_failure(
    tmp_path, monkeypatch, error, raised
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(resume, "commit", fail)
    with pytest.raises(raised, match="could not be written|a rank failed"):
        save_state(checkpoints_of(tmp_path), 1)


@pytest.mark.parametrize(
    "approach", ["packed", "token-list", "padding-free", "length-bucketed", "masked"]
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    lab, tmp_path, monkeypatch, approach
):
    kind = {"objective": "masked"} if approach == "masked" else {"approach": approach}
    run = run_of(model=replace(PRESETS["llama-micro"], dropout=0.1), **kind)
    inputs = lab.inputs(run)
    start(run, inputs, tmp_path / "whole")
    interrupted(run, inputs, tmp_path / "cut", at=8)
    states = sorted(f.name for f in (tmp_path / "cut/checkpoints").iterdir())
    assert states == ["step=00000003", "step=00000006"]
    monkeypatch.setattr(trainer, "initialise_part", None)  # a resumed run makes no initial weights
    start(run, inputs, tmp_path / "cut", attempt=1)
    assert series(tmp_path / "cut") == series(tmp_path / "whole")
    assert first_step(tmp_path / "cut/attempt=01") == 6, "it went on, and did not begin anew"
    assert read_sealed(tmp_path / "cut/run.json")["outcome"]["status"] == "complete"
    assert not (tmp_path / "cut/checkpoints").exists(), "resume states are deleted on success"


def test_another_world_size_goes_on_with_the_same_samples(lab, tmp_path):
    keep = CheckpointSettings(every=4, keep_resume_state=True, keep_last=9)
    for world_size, begin, state in (
        (1, 0, None),
        (3, 4, "1/checkpoints/step=00000004"),
        (2, 8, "3/checkpoints/step=00000008"),
    ):
        folder = tmp_path / str(world_size)
        run = run_of(
            world_size=world_size, checkpoints=keep, resume_from=state and str(tmp_path / state)
        )
        start(run, lab.inputs(run), folder)
        whole = series(tmp_path / "1")
        rest = series(folder)
        assert list(rest) == list(range(begin, STEPS))
        for step, (loss, _, rate, digest) in rest.items():
            assert (rate, digest) == whole[step][2:]
            assert loss == pytest.approx(whole[step][0], rel=1e-5)
        outcome = read_sealed(folder / "run.json")["outcome"]
        assert outcome.get("begins_at", 0) == begin
        assert outcome.get("begins_at_useful_tokens", 0) == sum(tokens_of(tmp_path / "1")[:begin])


def test_only_the_last_states_are_kept_and_the_final_weights_if_asked_for(lab, tmp_path):
    asked = CheckpointSettings(
        every=2, keep_last=2, keep_resume_state=True, final=True, best=True, at_start=True
    )
    run = run_of(checkpoints=asked)
    start(run, lab.inputs(run), tmp_path)
    folders = sorted(f.name for f in (tmp_path / "checkpoints").iterdir())
    assert folders == ["best", "final", "step=00000010", "step=00000012"]
    shape, weights = read_model(tmp_path / "checkpoints/final")
    assert shape.vocabulary_size and "blocks.0.attention.query.weight" in weights
    _, same = read_model(tmp_path / "checkpoints/step=00000012")
    assert all(weights[name].equal(same[name]) for name in weights)
    record = Checkpoint(tmp_path / "checkpoints/best").record
    assert record["kind"] == "model" and record["step"] in (0, 6, 12)
    assert (tmp_path / "checkpoints/final/tokenizer/manifest.json").is_file()


def test_a_checkpoint_of_other_data_or_code_is_refused_by_name(stopped, tmp_path):
    state = tmp_path / "step=00000006"
    mine = {"inputs": {"store": "a"}, "code_sha256": "a"}
    shutil.copytree(stopped / "checkpoints/step=00000006", state)
    record = read_json(state / "checkpoint.json")
    checkpoints = Checkpoints(run_of(), tmp_path, ALONE, mine, None)
    for theirs, differs in (({"inputs": {"store": "b"}}, "store"), ({"code_sha256": "b"}, "code")):
        write_sealed(state / "checkpoint.json", record | mine | theirs)
        with pytest.raises(UserError, match=f"other code or data.*\n.*\n +differs +{differs}"):
            checkpoints.named(str(state))
    with pytest.raises(UserError, match="another run.*\n.*checkpoint.*\n.*setting +seed"):
        Checkpoints(run_of(seed=3), tmp_path, ALONE, mine, None).named(str(state))
    # what is only validated on may be another
    others = {"inputs": {"store": "a", "validation_store": "b"}}
    write_sealed(state / "checkpoint.json", record | mine | others)
    assert checkpoints.named(str(state)).record["step"] == 6


def test_a_folder_of_older_states_is_noticed(lab, tmp_path, capsys):
    """The newest state is in no log yet where it was written beside the training, which then was
    killed.
    """
    run = run_of(checkpoints=CheckpointSettings(every=3, keep_last=3))
    interrupted(run, lab.inputs(run), tmp_path, at=11)
    states = Checkpoints(run, tmp_path, ALONE, {}, None)
    capsys.readouterr()
    assert states.newest().record["step"] == 9 and capsys.readouterr().out == ""
    for gone, left in (("69", 3), ("3", None)):
        for step in gone:
            shutil.rmtree(tmp_path / f"checkpoints/step=0000000{step}")
        found = states.newest()
        assert (found and found.record["step"]) == left
        told = capsys.readouterr().out
        assert (
            "the newest resume state of this run is missing" in told
            and "step=00000006  (events.jsonl)" in told
        )
        assert ("goes on from step=00000003" if left else "starts from scratch") in told


def test_source_files_that_are_edited_during_a_run_are_sealed_into_its_record(lab, tmp_path):
    run = run_of()
    source = Path(tokenscale.__file__).parent / "train/loop.py"
    code = {
        "train/loop.py": sha256_file(source),
        "train/gone.py": "0" * 64,
        "train/record.py": "1" * 64,
    }
    write_sealed(tmp_path / "attempt=00/attempt.json", {"digest": "a", "code": code})
    start(run, lab.inputs(run), tmp_path)
    assert read_sealed(tmp_path / "run.json")["outcome"]["code_changed"] == [
        "train/gone.py",
        "train/record.py",
    ]


def test_states_of_other_code_are_not_resumed(lab, tmp_path):
    """The launcher states the digest of code and inputs for each attempt."""
    run = run_of()
    inputs = lab.inputs(run)
    for attempt, digest in enumerate(["a", "b"]):
        write_sealed(tmp_path / f"attempt={attempt:02d}/attempt.json", {"digest": digest})
    interrupted(run, inputs, tmp_path, at=5)
    start(run, inputs, tmp_path, attempt=1)
    assert first_step(tmp_path / "attempt=01") == 0


def launch(
    lab, run: RunSettings, directory: Path, site: Path | str = "", python=sys.executable
) -> subprocess.Popen:
    argv = [python, "-m", "tokenscale", "launch", "--run", run.to_json(), "--site", str(site)]
    argv += [
        "--store",
        str(lab.store(run.store) / "manifest.json"),
        "--output",
        str(directory / "done.json"),
    ]
    if run.reads_tokenizer:
        argv += ["--tokenizer", str(lab.tokenizer / "manifest.json")]
    if run.validation.rows:
        argv += ["--validation-store", str(lab.store(run.validation_store) / "manifest.json")]
    return subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def launched(lab, run: RunSettings, directory: Path) -> tuple[int, str]:
    """(exit code, standard error) of a launcher and its ranks, forks of a process that has imported
    their packages.
    """
    process = launch(lab, run, directory, python=served.python())
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def wait_for(process: subprocess.Popen, ready: Callable[[], object], limit_s: float = 600) -> None:
    """Wait until something is there; what is to make it must live until then."""
    end = time.monotonic() + limit_s
    while not ready():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def first_step(attempt: Path) -> int:
    return json.loads((attempt / "rank=00000/steps.jsonl").read_text().splitlines()[0])["step"]


def test_a_launched_run_goes_on_from_anothers_state_whatever_it_keeps_itself(lab, tmp_path):
    """Its inputs are fewer: no tokenizer is kept, nothing validated. Its data and the code are the
    same.
    """
    keep = CheckpointSettings(every=4, keep_resume_state=True, keep_last=9)
    first = run_of(checkpoints=keep, device="cpu")
    assert launched(lab, first, tmp_path / "first") == (0, "")
    state = str(tmp_path / "first/checkpoints/step=00000004")
    changes = {
        "checkpoints": CheckpointSettings(),
        "validation": ValidationSettings(rows=0),
        "device": "cpu",
    }
    second = run_of(resume_from=state, model=replace(PRESETS["llama-micro"], name="own"), **changes)
    assert launched(lab, second, tmp_path / "second") == (0, "")
    whole = series(tmp_path / "first")
    assert series(tmp_path / "second") == {step: whole[step] for step in range(4, STEPS)}
    # as if killed before it deleted it
    (tmp_path / "second/checkpoints/step=00000008").mkdir(parents=True)
    assert launched(lab, second, tmp_path / "second") == (0, "")
    assert not list((tmp_path / "second/checkpoints").iterdir())
    code, said = launched(lab, replace(second, budget=BudgetSettings(steps=4)), tmp_path / "short")
    assert code == 2 and "end of this run's budget" in said


@pytest.mark.parametrize(
    ("budget", "other"),
    [({"useful_tokens": 1500}, {"steps": 10}), ({"steps": STEPS}, {"useful_tokens": 1500})],
)
def test_a_state_serves_a_run_with_another_kind_of_budget(lab, tmp_path, budget, other):
    """Tokens are counted whatever the budget: neither run begins to count anew."""
    state = str(tmp_path / "first/checkpoints/step=00000003")
    for name, kind, resume_from in (("first", budget, None), ("second", other, state)):
        keep = CheckpointSettings(every=3, keep_resume_state=True, keep_last=9)
        run = run_of(
            budget=BudgetSettings(**kind),
            checkpoints=keep,
            schedule=NO_WARMUP,
            resume_from=resume_from,
        )
        start(run, lab.inputs(run), tmp_path / name)
    tokens = tokens_of(tmp_path / "first")[:3] + tokens_of(tmp_path / "second")
    assert len(tokens) == 10 if "steps" in other else sum(tokens) >= 1500 > sum(tokens[:-1])


NO_WARMUP = ScheduleSettings(warmup_steps=0)
EACH = CheckpointSettings(every=1, keep_resume_state=True, keep_last=99)
OF_COSINE = {"schedule.floor": 0.1, "budget.steps": STEPS}


@pytest.fixture(scope="module")
def left(lab, tmp_path_factory):
    """Schedule → the states that a run with it left after each step."""

    @cache
    def states_of(schedule: ScheduleSettings) -> Path:
        run = run_of(checkpoints=EACH, schedule=schedule)
        folder = tmp_path_factory.mktemp("left")
        start(run, lab.inputs(run), folder)
        return folder / "checkpoints"

    return states_of


@pytest.mark.parametrize(
    ("shape", "budget", "changed", "named"),
    [
        ("cosine", {"steps": 20}, {}, {"budget.steps": STEPS}),
        ("linear", {"useful_tokens": 1500}, {}, {"budget.steps": STEPS}),
        ("cosine", {"steps": STEPS}, {}, None),
        ("constant", {"steps": 20}, {"floor": 0.5}, None),
        ("cosine", {"steps": STEPS}, {"floor": 0.5}, {"schedule.floor": 0.1}),
        ("linear", {"steps": STEPS}, {"warmup_steps": 3}, {"schedule.warmup_steps": 2}),
        ("cosine", {"steps": 20}, {"shape": "constant"}, {"schedule.shape": "cosine", **OF_COSINE}),
    ],
)
def test_learning_rates_of_other_settings_are_named(
    lab, tmp_path, left, shape, budget, changed, named
):
    """The steps before the state followed the other run's schedule and budget; so they did after a
    kill.
    """
    schedule = ScheduleSettings(shape=shape, warmup_steps=2)
    second = run_of(
        budget=BudgetSettings(**budget), schedule=replace(schedule, **changed), checkpoints=EACH
    )
    second = replace(second, resume_from=str(left(schedule) / "step=00000006"))
    interrupted(second, lab.inputs(second), tmp_path / "second", at=7)
    start(second, lab.inputs(second), tmp_path / "second", attempt=1)
    third = replace(second, resume_from=str(tmp_path / "second/checkpoints/step=00000007"))
    start(third, lab.inputs(third), tmp_path / "third")
    for name in ("second", "third"):
        assert read_sealed(tmp_path / name / "run.json").get("earlier_schedule") == named


def test_dropout_never_repeats_its_masks(lab, tmp_path, monkeypatch):
    """Not after a resumption at another world size, where one rank has rows that two had."""
    keep = CheckpointSettings(every=4, keep_resume_state=True, keep_last=9)
    two, one = (
        run_of(world_size=n, checkpoints=keep, model=replace(PRESETS["llama-micro"], dropout=0.3))
        for n in (2, 1)
    )
    start(two, lab.inputs(two), tmp_path / "two")
    seeds: list[list[int]] = []
    manual_seed = torch.manual_seed
    monkeypatch.setattr(
        torch, "manual_seed", lambda seed: (seeds[-1].append(seed), manual_seed(seed))[1]
    )
    for resumed in (one, replace(one, resume_from=str(tmp_path / "two/checkpoints/step=00000004"))):
        seeds.append([])
        train(resumed, lab.inputs(resumed), tmp_path / str(len(seeds)), ALONE)
    whole, rest = (seen[-steps:] for seen, steps in zip(seeds, (STEPS, STEPS - 4), strict=True))
    # of which the CPU's generator takes the lower half
    assert len({seed % 2**32 for seed in whole}) == STEPS
    assert rest == whole[4:]


def tokens_of(directory: Path) -> list[int]:
    return [line["useful_tokens"] for line in read_steps(directory).values()]


def test_a_run_in_tokens_that_was_killed_before_its_seal_trains_no_further(lab, tmp_path):
    run = run_of(budget=BudgetSettings(useful_tokens=1200), schedule=NO_WARMUP, checkpoints=EACH)
    start(run, lab.inputs(run), tmp_path)
    done = len(tokens_of(tmp_path))
    (tmp_path / "run.json").unlink()
    start(run, lab.inputs(run), tmp_path, attempt=1)
    assert (tmp_path / "attempt=01/rank=00000/steps.jsonl").read_text() == ""
    assert read_sealed(tmp_path / "run.json")["outcome"]["steps"] == done


def test_a_run_that_diverged_keeps_its_states_and_no_best_of_nothing(lab, tmp_path):
    run = run_of(
        checkpoints=CheckpointSettings(every=1, best=True),
        optimizer=OptimizerSettings(learning_rate=1e30, clip_norm=None),
        validation=ValidationSettings(rows=4, every=1, at_start=False),
    )
    start(run, lab.inputs(run), tmp_path)
    assert read_sealed(tmp_path / "run.json")["outcome"]["status"] == "nonfinite"
    assert list((tmp_path / "checkpoints").glob("step=*"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "json", "step"])
def test_a_damaged_state_is_passed_over_for_an_older_one(lab, stopped, tmp_path, damage):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints/step=00000006"
    file = newest / ("checkpoint.json" if damage in ("json", "step") else "rank=00000.safetensors")
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        step = content.replace(b'"step": 6', b'"step": 7')  # one bit
        file.write_bytes(
            {"cut": content[:-1], "flipped": flipped, "json": content[:-5], "step": step}[damage]
        )
        assert file.read_bytes() != content
    run = run_of()
    interrupted(run, lab.inputs(run), tmp_path, at=5, attempt=1)
    assert (tmp_path / "checkpoints/step=00000006.damaged").is_dir(), (
        "its name is newer: new states would be pruned"
    )
    assert first_step(tmp_path / "attempt=01") == 3
    start(run, lab.inputs(run), tmp_path, attempt=2)
    assert not (tmp_path / "checkpoints").exists()


def test_no_file_of_a_checkpoint_runs_code(lab, tmp_path):
    """A pickle that would write a file, in the place of each file in turn, its hash put right where
    one is kept.
    """
    run = run_of(checkpoints=CheckpointSettings(keep_resume_state=True))
    start(run, lab.inputs(run), tmp_path / "run")
    trace = tmp_path / "it-ran"

    class Evil:
        def __reduce__(self):
            return open, (str(trace), "w")

    evil = pickle.dumps(Evil())
    good = tmp_path / f"run/checkpoints/step={STEPS:08d}"
    for file in sorted(f.relative_to(good) for f in good.rglob("*") if f.is_file()):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        (bad / file).write_bytes(evil)
        _restate(bad)
        for read in (read_model, everything, lambda folder: load_tokenizer(folder / "tokenizer")):
            with contextlib.suppress(UserError):
                read(bad)
        assert not trace.exists(), file


def everything(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names():
        checkpoint.tensor(name)


def _restate(folder: Path) -> None:
    """Make the hashes fit the files, as somebody who plants one would."""
    from tokenscale.train.checkpoint import _fingerprint

    try:
        rank = read_json(folder / "rank=00000.json")
        write_json(
            folder / "rank=00000.json", rank | _fingerprint(folder / "rank=00000.safetensors")
        )
    except UserError:
        pass
    try:
        record = read_json(folder / "checkpoint.json")
        record["ranks"]["rank=00000.json"] = _fingerprint(folder / "rank=00000.json")
        write_sealed(folder / "checkpoint.json", record)
    except UserError:
        pass


def test_kill_9_at_a_random_moment(lab, tmp_path):
    """Real processes and a real signal, at a moment nobody chose; then the same command again."""
    run = run_of(
        *("length-bucketed", 2),
        objective="masked",
        budget=BudgetSettings(steps=30),
        checkpoints=CheckpointSettings(every=4),
        validation=ValidationSettings(rows=0),
        device="cpu",
    )
    start(run, lab.inputs(run), tmp_path / "whole")
    process = launch(lab, run, tmp_path / "cut", python=served.python())
    wait_for(process, lambda: list((tmp_path / "cut/checkpoints").glob("step=*[0-9]")))
    time.sleep(random.random() * 0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert launched(lab, run, tmp_path / "cut")[0] == 0
    whole = series(tmp_path / "whole")
    cut = series(tmp_path / "cut")
    assert cut == whole and len(whole) == 30
    # it may have finished before the signal came
    if len(list((tmp_path / "cut").glob("attempt=*"))) == 2:
        assert (step := first_step(tmp_path / "cut/attempt=01")) % 4 == 0 and step > 0
