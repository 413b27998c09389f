"""What `doctor` says of SLURM, by programs that say what its own say."""

import sys

import pytest

from tests.machines import ROOT, asked, program
from tokenscale.cli import doctor_checks


@pytest.fixture
def programs(monkeypatch, tmp_path):
    for name in ("SLURM_JOB_ID", "ALPS_ACCOUNT", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("srun", "squeue"):
        program(tmp_path, name, "exit 0")
    program(tmp_path, "sbatch", "echo slurm 22.05.8")
    program(tmp_path, "sinfo", "echo 'normal*'; echo debug; echo debug")
    program(tmp_path, "sacct", "exit 0")
    monkeypatch.setenv("ALPS_ACCOUNT", "g123")
    return tmp_path


def test_a_cluster_whose_services_answer_is_ok(programs):
    found = doctor_checks.check_slurm(asked())
    assert (found.verdict, found.fact) == ("ok", "slurm 22.05.8, partitions normal*, debug")


@pytest.mark.parametrize(
    "spoil, verdict, words",
    [
        (lambda folder, env: (folder / "sbatch").unlink(), "no", "sbatch not found"),
        (lambda folder, env: (folder / "srun").unlink(), "no", "srun not found"),
        (
            lambda folder, env: program(folder, "sinfo", "echo 'Unable to contact slurm controller'; exit 1"),
            "no",
            "controller does not respond: Unable to contact",
        ),
        (lambda folder, env: program(folder, "sacct", "exit 1"), "note", "--slurm-status-command squeue"),
        (lambda folder, env: (folder / "sacct").unlink(), "note", "--slurm-status-command squeue"),
        (lambda folder, env: env.delenv("ALPS_ACCOUNT"), "note", "export ALPS_ACCOUNT"),
        (lambda folder, env: env.setenv("SLURM_JOB_ID", "42"), "note", "inside job 42"),
    ],
)
def test_what_a_cluster_lacks_is_told(programs, monkeypatch, spoil, verdict, words):
    spoil(programs, monkeypatch)
    found = doctor_checks.check_slurm(asked())
    assert found.verdict == verdict and words in f"{found.fact}; {found.next}", found


def test_a_program_that_hangs_is_given_up(tmp_path):
    assert doctor_checks.run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5) == (
        None,
        "no output within 0.5 s",
    )
    assert doctor_checks.run_command([str(tmp_path / "none")])[0] is None


def test_the_image_of_trainings_is_missed_where_it_should_be(programs, monkeypatch, tmp_path):
    """profiles/alps/train.toml says where; without SCRATCH this is another cluster."""
    monkeypatch.chdir(ROOT)
    assert doctor_checks.check_slurm(asked()).verdict == "ok"
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    found = doctor_checks.check_slurm(asked())
    assert found.verdict == "note" and f"{tmp_path}/ce-images/" in found.fact and "step 5" in found.next
    image = doctor_checks.find_missing_image()
    (tmp_path / "ce-images").mkdir()
    (tmp_path / image).touch()
    assert doctor_checks.check_slurm(asked()).verdict == "ok"
