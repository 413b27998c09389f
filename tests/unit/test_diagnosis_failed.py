"""What `status --failed` reads in the events of Snakemake 9.27 and its executor for SLURM 2.8, in
their words.
"""

import json

import pytest

from tests.operations import count_operations
from tokenscale.cli import main as cli
from tokenscale.cli.status.failed import describe_failures

RUN = "packed-llama-tiny-ddp-w2-0123456789"
OWN = f"results/logs/train/{RUN}.log"
SLURM = f"results/logs/slurm/rule_train/{RUN}/8.log"
WORDS = (
    "For further error details see the cluster/cloud log and the log files of the involved rule(s)."
)
MESSAGE = (
    f"SLURM-job '8' failed, SLURM status is: 'FAILED'. Detailed failure reason unavailable.{WORDS}"
)
FAILED = {
    "event": "job_error",
    "rule": "train",
    "jobid": 3,
    "output": [f"results/runs/{RUN}/done.json"],
}
FAILED |= {"log": [OWN, SLURM], "reason": "", "message": MESSAGE, "slurm": "8"}
REFUSAL = f"""SLURM sbatch failed. The error message was 'sbatch: error: Memory specification can not be satisfied
sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified'.
    sbatch call:
        sbatch --parsable --job-name x --comment rule_train -A g1 --wrap="snakemake --x 'Invalid account'"
{WORDS}"""
REFUSED = FAILED | {"jobid": 2, "log": [OWN], "message": REFUSAL, "slurm": None}
STARTED = FAILED | {"event": "job_info", "message": "train", "slurm": None}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in (
        ".snakemake/log",
        "results/logs/train",
        f"results/logs/slurm/rule_train/{RUN}",
        "results/logs/ingest",
    ):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def said(folder, capsys, *events):
    log = folder / ".snakemake/log/2026-11-21T161155.1.snakemake.log"
    log.touch()
    log.with_suffix(".jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert cli.main(["status", "--failed"]) == 0
    return capsys.readouterr().out


def test_a_refused_job_shows_what_sbatch_said_and_not_its_call(folder, capsys):
    (folder / OWN).write_text("a log of an earlier attempt: No space left on device\n")
    text = said(folder, capsys, REFUSED)
    assert text.startswith("1 job failed") and f"\nrun {RUN}  refused by sbatch\n" in text
    assert (
        "Batch job submission failed: Invalid account or account/partition combination specified\n"
        in text
    )
    assert "export ALPS_ACCOUNT" in text
    assert "--parsable" not in text and "earlier attempt" not in text


def test_a_failed_job_shows_the_end_of_its_own_log_and_why(folder, capsys):
    (folder / OWN).write_text(
        "".join(f"step {n}/100\n" for n in range(100)) + "ValueError: no tokens\n"
    )
    (folder / SLURM).write_text(
        "Command: python -m snakemake --x 'CUDA out of memory'\nTrying to exit\n"
    )
    text = said(folder, capsys, FAILED)
    assert f"\nrun {RUN} (SLURM job 8)  FAILED\n  why     Python raised an exception\n" in text
    assert (
        "          | step 99/100\n          | ValueError: no tokens\n" in text
        and "step 80/100" not in text
    )
    assert "GPU's memory" not in text


def test_what_slurms_log_says_counts_and_the_state_alone_is_enough(folder, capsys):
    timeout = FAILED | {"message": MESSAGE.replace("FAILED", "TIMEOUT")}
    text = said(folder, capsys, timeout)
    assert (
        "TIMEOUT\n  why     its time limit was over" in text
        and "log     none: SLURM-job '8' failed" in text
    )
    command = (
        "Command 'python -m tokenscale launch # CUDA out of memory' returned non-zero exit "
        "status 127.\n"
    )
    (folder / SLURM).write_text(
        f"/var/spool/job8/slurm_script: line 3: python: command not found\n{command}"
    )
    text = said(folder, capsys, FAILED)  # it never came to its command
    assert (
        f"  log     {SLURM}\n" in text
        and "command not found" in text
        and "GPU's memory" not in text
    )
    (folder / OWN).write_text("step 1/100\n")
    cancelled = (
        "slurmstepd: error: *** JOB 8 ON nid2 CANCELLED AT 2026-11-21T16:12:12 DUE TO TIME LIMIT "
        "***"
    )
    (folder / SLURM).write_text(cancelled)
    assert "why     its time limit was over" in said(folder, capsys, FAILED)


def test_the_rank_that_failed_first_is_looked_at(folder, capsys):
    (folder / OWN).write_text(
        "tokenscale: rank 1 failed first (exit code 1); ending 1 other rank(s).\n"
    )
    output = folder / f"results/runs/{RUN}/attempt=00/output"
    output.mkdir(parents=True)
    (output / "rank=00000.log").write_text(
        "RuntimeError: [..] Connection closed by peer [127.0.0.1]:3\n"
    )
    (output / "rank=00001.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    text = said(folder, capsys, FAILED | {"message": ""})
    assert "attempt=00/output/rank=00001.log\n          | torch.OutOfMemoryError" in text
    assert "a GPU's memory was full" in text


def test_a_retry_that_went_well_is_no_failure_and_a_dry_run_not_the_last_call(folder, capsys):
    (folder / ".snakemake/log/2026-11-21T170000.1.snakemake.log").touch()
    assert said(folder, capsys, STARTED, FAILED, STARTED).startswith(
        "nothing failed in Snakemake's last call"
    )
    text = said(folder, capsys, STARTED, FAILED, STARTED, FAILED | {"slurm": "9"})
    assert text.startswith("1 job failed") and "(SLURM job 9)" in text


def test_many_failures_stay_readable(folder, capsys):
    for event, shown in ((REFUSED, 1), (FAILED, 0)):
        text = said(folder, capsys, *[event | {"jobid": n} for n in range(100)])
        assert text.startswith("100 jobs failed") and len(text.splitlines()) < 160
        assert text.count("refused by sbatch") == shown, "jobs with one cause are told once"


def test_of_many_runs_only_the_folders_of_failed_ones_are_read(folder):
    def count(runs: int) -> int:
        log = folder / ".snakemake/log/2026-11-21T161155.1.snakemake.log"
        log.touch()
        events = []
        for number in range(runs):
            run = RUN[:-2] + f"{number:02d}"
            (folder / f"results/runs/{run}/attempt=00").mkdir(parents=True, exist_ok=True)
            (folder / f"results/logs/train/{run}.log").write_text("ValueError: no tokens\n")
            output = [f"results/runs/{run}/done.json"]
            events.append(json.dumps(FAILED | {"jobid": number, "output": output}))
        log.with_suffix(".jsonl").write_text("\n".join(events))
        return count_operations(describe_failures)

    count(10)  # fills caches of compiled patterns
    few = count(10)
    assert count(40) < 5 * few


def test_nothing_to_read_is_no_failure(folder, capsys):
    assert cli.main(["status", "--failed"]) == 0
    assert capsys.readouterr().out == "no job has run here yet\n"
    (folder / "named.log").touch()  # what Snakemake's hook asks after Ctrl-C
    assert cli.main(["status", "--failed", "named.log"]) == 0
    assert capsys.readouterr().out == ""
