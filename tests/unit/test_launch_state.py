"""The state of another run that a run goes on from is an input of it, by its content."""

import shutil
from dataclasses import replace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_sealed
from tokenscale.runs.launch.attempts import describe_saved_state, hash_identity, prepare_attempt
from tokenscale.runs.launch.start import open_run
from tokenscale.runs.records import provenance
from tokenscale.settings.run import RunSettings, state_path

WRITER = "packed-llama-micro-single-w1-0123456789"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that goes on from a state whose record is there."""
    monkeypatch.chdir(tmp_path)
    where = state_path(WRITER, 8)
    write_sealed(tmp_path / where / "checkpoint.json", {"step": 8})
    return RunSettings(resume_from=where)


def sealed(run, directory):
    """The identity of an attempt that was made and sealed."""
    with open_run(run, directory / "done.json", {}) as (identity, attempt, _):
        record = provenance.start_record(directory, {"attempt": attempt, "digest": identity.digest})
        provenance.seal_record(directory, record, {"status": "complete", "steps": 24})
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


def test_what_a_run_without_a_state_is_made_of_says_nothing_of_one(tmp_path):
    (tmp_path / "code.py").write_text("")
    identity = hash_identity([tmp_path / "code.py"], {})
    assert identity.digest == identity.code_and_inputs and "state" not in identity.record()
    assert prepare_attempt(tmp_path / "run", RunSettings(), identity) == 0


def test_a_state_that_was_purged_is_told_with_what_makes_it_again(run, tmp_path):
    shutil.rmtree(tmp_path / run.resume_from)
    with pytest.raises(UserError) as caught, open_run(run, tmp_path / "results/runs/later/done.json", {}):
        pass
    assert f"rm -r results/runs/{WRITER}, and snakemake results/runs/{WRITER}/done.json" in str(caught.value)
    with pytest.raises(UserError, match="existing state"):
        with open_run(replace(run, resume_from="elsewhere/step=00000008"), tmp_path / "run/done.json", {}):
            pass


@pytest.mark.parametrize(
    "saved, words",
    [([], "no state"), (["step=00000004", "step=00000012", "final"], "step 12"), (["step=7.partial"], "no state")],
)
def test_a_run_that_was_ended_at_once_tells_its_saved_state(tmp_path, saved, words):
    for name in saved:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "checkpoint.json").touch()
    assert words in describe_saved_state(tmp_path)
