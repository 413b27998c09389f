"""What a failed job is told to have died of, by messages as SLURM, torch and NCCL write them; reports of hangs."""

import pytest

from tokenscale.base.errors import UserError
from tokenscale.runs.launch.failure_hints import describe_hang, find_hint

PEER = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52093\n"
    "srun: error: nid000002: task 1: Exited with exit code 1\n"
    "slurmstepd: error: *** STEP 7.0 ON nid000001 CANCELLED AT 2026-11-21T16:12:12 ***\n"
    "W1121 16:12:12.120000 31 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 42 closing signal"
    " SIGTERM\n"
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.50 GiB"
WATCHDOG = (
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)
REFUSED = "SLURM sbatch failed. The error message was 'sbatch: error: Batch job submission failed: {}'."


@pytest.mark.parametrize(
    "words, text",
    [
        ("the account or the QOS", REFUSED.format("Invalid account or account/partition combination specified")),
        ("no such partition", REFUSED.format("Invalid partition name specified")),
        ("the account or the QOS", REFUSED.format("Invalid qos specification")),
        ("more time than", REFUSED.format("Requested time limit is invalid (missing or exceeds some limit)")),
        ("no node of this partition", REFUSED.format("Requested node configuration is not available")),
        ("no node of this partition", "sbatch: error: Memory specification can not be satisfied"),
        ("controller did not answer", "sbatch: error: Batch job submission failed: Unable to contact slurm controller"),
        ("the container", "slurmstepd: error: pyxis: couldn't start container"),
        ("the container", "slurmstepd: error: pyxis: container start failed with error code: 1"),
        ("the container", "slurmstepd: error: pyxis: failed to import docker image"),
        ("did not find a module", "ModuleNotFoundError: No module named 'tokenscale'"),
        ("did not find a module", "/usr/bin/python: No module named tokenscale"),
        ("GPU's memory", CUDA),
        ("GPU's memory", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("main memory", "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have"),
        ("main memory", "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup."),
        ("main memory", "srun: error: nid001277: tasks 1-3: Out Of Memory"),
        ("main memory", "slurmstepd: error: StepId=7.0 exceeded memory limit (943718400 > 314572800), being killed"),
        ("main memory", "memory allocation of 34359738368 bytes failed"),
        ("main memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
        ("disk", "OSError: [Errno 28] No space left on device"),
        ("disk", "OSError: [Errno 122] Disk quota exceeded: 'results/runs/x/checkpoints'"),
        ("a node failed", "srun: error: Node failure on nid000003"),
        ("a node failed", "*** JOB 6 ON nid000002 CANCELLED AT 2026-11-21T16:12:12 DUE TO NODE FAILURE, SEE SLURMCTLD"),
        ("higher priority", "*** STEP 6.0 ON nid000002 CANCELLED AT 2026-11-21T16:12:12 DUE TO PREEMPTION ***"),
        ("time limit", "slurmstepd: error: *** JOB 6 ON nid2 CANCELLED AT 2026-11-21T16:12:12 DUE TO TIME LIMIT ***"),
        ("port", "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "),
        ("network plugin", "nid001:31:31 [0] init.cc:1 NCCL WARN Error: network AWS Libfabric not found."),
        ("cancelled the job", "slurmstepd-nid1: error: *** JOB 1 ON nid000001 CANCELLED AT 2026-11-21T16:12:12 ***"),
        ("timed out", WATCHDOG),
        ("timed out", "RuntimeError: [..] Timed out waiting 1800000ms for recv operation to complete"),
        ("exception", "ValueError: the row has no tokens"),
        ("exception", "[rank1]: KeyError: 'loss'"),
        ("did not reach", "The client socket has timed out after 60000ms while trying to connect to (nid1, 29500)."),
        ("lost its peer", PEER),
        ("killed without a message", "tokenscale: rank 2 failed first (signal SIGKILL); ending 3 other rank(s)."),
        ("killed without a message", "srun: error: nid000001: task 0: Killed"),
        ("killed without a message", "  exitcode  : -9 (pid: 4242)"),
        ("its state was saved", "interrupted by SIGINT after step 53; the next attempt goes on from there"),
        ("ended by Ctrl-C", "tokenscale: interrupted."),
        (
            "of step 5",
            "tokenscale: x was ended at once.\n  cause  Ctrl-C twice; its state is of step 5\n  next   again",
        ),
        ("its state was saved", "interrupted by SIGTERM after step 1; the next attempt goes on from there"),
        ("ended by Ctrl-C", 'Traceback (most recent call last):\n  File "rank.py"\nKeyboardInterrupt'),
    ],
)
def test_a_message_is_told_by_its_cause(words, text):
    if words == "port":
        text += "code: -98, name: EADDRINUSE, message: address already in use"
    found = find_hint("step 1/24  loss 8.3  16,991 useful tokens/s  6 s left", text)
    assert found and words in found.what, found
    assert found.next and found.line in text


def test_the_state_of_a_silent_job_is_enough():
    states = {"TIMEOUT": "time limit", "OUT_OF_MEMORY": "main memory", "NODE_FAIL": "a node failed"}
    states |= {"PREEMPTED": "higher priority", "CANCELLED by 1000": "cancelled the job"}
    assert [state for state, words in states.items() if words not in find_hint("", state=state).what] == []


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
    assert "GPU's memory" in find_hint(WATCHDOG, CUDA).what, "a dead peer brings the watchdog of the others along"
    error = UserError("the token store does not match this run.", run="x wants 2048", next="snakemake -f x")
    found = find_hint(PEER, f"step 1\n{error.render()}\n")
    assert (found.what, found.next) == ("the token store does not match this run", "snakemake -f x")
    told = "tokenscale: rank 5 on nid2 failed first (Killed).\n  output  x/rank=00005.log, which ends:\n    | step 3\n"
    found = find_hint(told + "  cause   a GPU's memory was full\n  next    a smaller micro_batch\n")
    assert (found.what, found.next) == ("a GPU's memory was full", "a smaller micro_batch")
    assert found.line == "tokenscale: rank 5 on nid2 failed first (Killed)."


def test_what_nobody_knows_is_not_guessed():
    assert find_hint("step 24/24  loss 6.9158", "complete: results/runs/x/run.json", state="FAILED") is None
    assert find_hint() is None
    # what NCCL says at any start
    assert find_hint("h:1:1 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).") is None
    assert find_hint("NCCL_TIMEOUT=600 is set") is None


WAITS, STUCK = 'File "torch/distributed/x.py", line 1 in wait', 'File "loop.py", line 9 in reading_for_ever'


@pytest.mark.parametrize("stack", [None, WAITS, STUCK])
def test_a_hang_of_a_thousand_ranks_is_a_short_report(tmp_path, stack):
    for rank in range(1000):
        text = f"Current thread 0x1 (most recent call first):\n  {stack}\n" if rank != 3 else WAITS
        if stack or rank == 3:
            (tmp_path / f"rank={rank:05d}").mkdir()
            (tmp_path / f"rank={rank:05d}/stacks.txt").write_text(text)
    said = describe_hang(tmp_path, 1000)
    assert len(said) < 2000 and "rank 0" in said and "next" in said
