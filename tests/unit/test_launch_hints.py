"""What a failed job is told to have died of, by messages as SLURM, torch and NCCL write them;
reports of hangs.
"""

from pathlib import Path

import pytest
import yaml

from tokenscale.base.errors import UserError
from tokenscale.runs.launch.failure_hints import describe_hang, find_hint

MESSAGES = yaml.safe_load(Path(__file__).with_name("failed_jobs.yaml").read_text())
(PEER,) = MESSAGES["lost its peer"]
CUDA = MESSAGES["GPU's memory"][0]
WATCHDOG = MESSAGES["timed out"][0]


@pytest.mark.parametrize(
    ("words", "text"), [(words, text) for words, texts in MESSAGES.items() for text in texts]
)
def test_a_message_is_told_by_its_cause(words, text):
    found = find_hint("step 1/24  loss 8.3  16,991 useful tokens/s  6 s left", text)
    assert found and words in found.what, found
    assert found.next and found.line in text


def test_the_state_of_a_silent_job_is_enough():
    states = {"TIMEOUT": "time limit", "OUT_OF_MEMORY": "main memory", "NODE_FAIL": "a node failed"}
    states |= {"PREEMPTED": "higher priority", "CANCELLED by 1000": "cancelled the job"}
    assert [
        state for state, words in states.items() if words not in find_hint("", state=state).what
    ] == []


def test_an_echo_never_hides_the_cause():
    """Wherever it stands: ranks write at the same time."""
    for cause, words in [
        (CUDA, "GPU's memory"),
        ("srun: error: nid001277: tasks 1-3: Out Of Memory", "main memory"),
        ("srun: error: Node failure on nid000003", "a node failed"),
        (WATCHDOG, "timed out"),
        ("ValueError: the row has no tokens", "exception"),
    ]:
        assert words in find_hint(f"{cause}\n", PEER, state="FAILED").what
        assert words in find_hint(PEER, f"{cause}\n", state="FAILED").what


def test_our_own_message_says_it_best_and_what_a_launcher_found_before_is_said_again():
    assert "GPU's memory" in find_hint(WATCHDOG, CUDA).what, (
        "a dead peer brings the watchdog of the others along"
    )
    error = UserError(
        "the token store does not match this run.", run="x wants 2048", next="snakemake -f x"
    )
    found = find_hint(PEER, f"step 1\n{error.render()}\n")
    assert (found.what, found.next) == ("the token store does not match this run", "snakemake -f x")
    told = (
        "tokenscale: rank 5 on nid2 failed first (Killed).\n  output  x/rank=00005.log, which "
        "ends:\n    | step 3\n"
    )
    found = find_hint(told + "  cause   a GPU's memory was full\n  next    a smaller micro_batch\n")
    assert (found.what, found.next) == ("a GPU's memory was full", "a smaller micro_batch")
    assert found.line == "tokenscale: rank 5 on nid2 failed first (Killed)."


def test_what_nobody_knows_is_not_guessed():
    assert (
        find_hint("step 24/24  loss 6.9158", "complete: results/runs/x/run.json", state="FAILED")
        is None
    )
    assert find_hint() is None
    # what NCCL says at any start
    assert find_hint("h:1:1 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).") is None
    assert find_hint("NCCL_TIMEOUT=600 is set") is None


WAITS = 'File "torch/distributed/x.py", line 1 in wait'
STUCK = 'File "loop.py", line 9 in reading_for_ever'


@pytest.mark.parametrize("stack", [None, WAITS, STUCK])
def test_a_hang_of_a_thousand_ranks_is_a_short_report(tmp_path, stack):
    for rank in range(1000):
        text = f"Current thread 0x1 (most recent call first):\n  {stack}\n" if rank != 3 else WAITS
        if stack or rank == 3:
            (tmp_path / f"rank={rank:05d}").mkdir()
            (tmp_path / f"rank={rank:05d}/stacks.txt").write_text(text)
    said = describe_hang(tmp_path, 1000)
    assert len(said) < 2000 and "rank 0" in said and "next" in said
