"""Find the cause of a failed job and the next step, from its logs and SLURM's state; describe a
hang.

Patterns come from SLURM 22.05 and torch and from public reports; none has been seen on Alps.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenscale.base.errors import few
from tokenscale.runs.launch.ranks import KILLED, NEXT_IF_KILLED
from tokenscale.runs.records.provenance import read_text


@dataclass(frozen=True)
class Hint:
    """Cause of a failure and next step. `line` is the log line that matched."""

    what: str
    next: str
    line: str = ""


#: exceptions that another process's failure causes
ECHOES = (
    "(?:[Cc]onnection (?:closed|reset)|failed to connect|has timed out|connectFullMesh|Broken "
    "pipe|ConnectionRefused"
    "|ChildFailedError|CalledProcessError|WorkflowError|SignalException)"
)
RESUMES = "start Snakemake again: the training goes on from its last checkpoint"
#: Cause, next step, and patterns, of which any may match. Root causes come first: the first cause
#: that matches anywhere is reported. If one rank runs out of memory, the others lose their peer,
#: srun cancels the step and kills the batch script: four messages, one cause. Add new causes above
#: the failures that they cause.
CAUSES = rf"""
SLURM does not know the account or the QOS, or does not let it use this partition
    export ALPS_ACCOUNT=<project>, or slurm_account and qos in the profile; `sacctmgr show associations user=$USER`
    [Ii]nvalid (?:account|qos)|InvalidAccount|InvalidQOS|QOSNotAllowed|given account \S+ appears to be invalid
there is no such partition here
    slurm_partition in the profile; `sinfo -s` lists partitions
    [Ii]nvalid partition|partition \S+ is (?:invalid|not valid)
the job asks for more time than its partition allows
    a smaller `minutes` in machine.toml (trainings) or `runtime` in the profile; `sinfo -o '%P %l'` shows the limits
    Requested time limit is invalid|Time limit specification required
no node of this partition has what the job asks for
    compare its resources (mem_mb, gpu, nodes, threads) with `sinfo -o '%P %D %c %m %G'`
    Requested node configuration is not available|Memory specification can not be satisfied|BadConstraints
    More processors requested than permitted|Node count specification invalid
    Requested partition configuration not available
SLURM's controller did not answer
    `scontrol ping`; start Snakemake again when it answers
    Unable to contact slurm controller|Socket timed out on send/recv operation|slurm_load_jobs error
the container did not start
    check `image` and `mounts` in the environment definition file that the machine's file names as `container`
    pyxis: (?:couldn't start container|container start failed|failed to import|.*[Nn]o such file)
    enroot.*(?:\[ERROR\]|[Nn]o such file)|(?:EDF|environment definition).*(?:not found|[Nn]o such file|invalid)
    unrecognized option '--(?:environment|edf|container-image)
the Python of the ranks is missing, which may be one inside a container
    correct `python` in the machine's file; on Alps profiles/alps/prepare.sh installs it
    execve\(\): \S*python\S*: No such file
Python did not find a module where the ranks run, which may be inside a container
    install it there (`pip install --no-deps .` for this package), or correct `python` in the machine's file
    ModuleNotFoundError: No module named|python\S*: No module named|ImportError: lib\S+: cannot open shared
a GPU's memory was full
    a smaller micro_batch, activation_checkpointing, or a layout that shards the model
    torch\.(?:cuda\.)?OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory
    CUBLAS_STATUS_ALLOC_FAILED|Cuda failure \S*'out of memory'
the node's main memory, or the job's share of it, was full
    a larger memory_mb in machine.toml (trainings) or mem_mb in the profile, or fewer runs on one node
    oom[-_]kill|OOM[- ]Kill|Out Of Memory|^state OUT_OF_MEMORY|[Ee]xceeded (?:job |step |virtual )?memory limit
    DefaultCPUAllocator: (?:can't allocate|not enough) memory|^MemoryError|Cannot allocate memory
    ^memory allocation of \d+ bytes failed|std::bad_alloc
the disk, or your quota on it, is full
    `df -h results` and `df -i results`, then make room, or put results on another file system
    No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]
a node failed; the job did nothing wrong
    {RESUMES}
    DUE TO NODE FAILURE|[Nn]ode failure on|^state (?:NODE_FAIL|BOOT_FAIL)|failed due to a node failure
a job of higher priority took its nodes
    {RESUMES}
    DUE TO PREEMPTION|^state PREEMPTED
its time limit was over
    {RESUMES}; or ask for a longer `runtime`, or a smaller `signal_s` if it had not begun
    DUE TO TIME LIMIT|^state (?:TIMEOUT|DEADLINE)|User defined signal 1
the port on which ranks meet was taken by another process
    start it again; if it stays, look for a process that an earlier job left on the first node
    EADDRINUSE|[Aa]ddress already in use
NCCL did not find the network plugin that this machine needs
    check the plugin's path or hook in the container, and `network` in the machine's file; NCCL_DEBUG=INFO logs it
    Failed to initialize any NET plugin|[Nn]etwork \S.* not found|NET/OFI.*No eligible providers
somebody cancelled the job
    start Snakemake again if that was not meant: the training goes on from its last checkpoint
    \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*|^state CANCELLED|CANCELLED by \d+
a collective timed out: some rank came late, stopped, or called another collective
    look at the rank whose log stops first; a slow first step may need a longer timeout
    caught collective operation timeout|Watchdog.*(?:timeout|hang)|DistBackendError.*[Tt]imeout
    wait timeout after \d+ms|[Tt]imed out waiting \d+ms for (?:recv|send) operation
Python raised an exception
    its traceback is in the log
    ^(?:\[rank\d+\]: *)?(?!.*{ECHOES})(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): .+
a rank did not reach the first one
    look at the log of rank 0; between nodes, MASTER_ADDR must be a name that every node resolves
    The client socket has (?:timed out|failed to connect)|connectFullMesh failed|ConnectionRefusedError
a rank lost its peer: another one had failed before
    look at the rank that failed first, which the launcher names
    [Cc]onnection closed by peer|[Cc]onnection reset by peer|Broken pipe
{KILLED}
    {NEXT_IF_KILLED}
    exit ?code *:? (?:137|-9)\b|SIGKILL|: Killed$|^Killed$|died from signal 9
it was stopped by Ctrl-C or another signal, and its state was saved
    {RESUMES}
    ^interrupted by SIG\w+ after step \d+
it was ended by Ctrl-C
    start Snakemake again: what is finished is kept, and a training goes on from its last checkpoint, if it has one
    ^KeyboardInterrupt|^tokenscale: interrupted\.
it was terminated, by a scheduler or by hand
    {RESUMES}
    exit ?code *:? (?:143|-15)\b|SIGTERM|: Terminated$|^Terminated$
"""
_ROWS = [
    [line.strip() for line in row.splitlines()] for row in re.split(r"\n(?=\S)", CAUSES.strip())
]
_COMPILED = [
    (re.compile("|".join(patterns), re.MULTILINE), what, next) for what, next, *patterns in _ROWS
]
#: message of a UserError: a sentence, then labelled facts with the next step as `next`
_OWN = re.compile(
    r"^tokenscale: (?P<what>.+)\n(?P<facts>(?:  .*\n)*?)  next +(?P<next>.+)", re.MULTILINE
)


def find_hint(*texts: str, state: str | None = None) -> Hint | None:
    """Return the cause: a UserError in the logs, else the first of `CAUSES` that matches them or
    SLURM's state.
    """
    known = f"state {state}"
    output = "\n".join([*([known] if state else []), *texts])
    # it names both values and the file, or a cause that was found here before
    if own := _OWN.search(output):
        cause = re.search(r"^  cause +(.+)", own["facts"], re.MULTILINE)
        what = cause[1] if cause else own["what"]
        return Hint(
            what=what.strip().rstrip("."),
            next=own["next"].strip(),
            line=f"tokenscale: {own['what']}",
        )
    for pattern, what, next_step in _COMPILED:
        if found := pattern.search(output):
            start = output.rfind("\n", 0, found.start()) + 1
            end = output.find("\n", found.end())
            line = output[start : end if end >= 0 else None].strip()
            return Hint(what=what, next=next_step, line="" if line == known else line)
    return None


#: file of srun's own output, next to the ranks' output
SRUN = "srun.log"
#: number of lines of a rank's output to show
TAIL = 20


def describe_failure(outputs: Path) -> str:
    """Return a report of the failure: first failed rank, its output's path and last lines, cause,
    next step.

    Tasks that failed later did so because of the first: `srun: error: nid2: task 5: Exited with
    exit code 1`.
    """
    output = read_text(outputs / SRUN)
    rank_text = ""
    if first := re.search(r"error: (\S+): tasks? (\d+)[^:]*: (.+)", output):
        path = outputs / f"rank={int(first[2]):05d}.log"
        rank_text = read_text(path)
        tail = rank_text.splitlines()[-TAIL:]
        lines = [f"tokenscale: rank {first[2]} on {first[1]} failed first ({first[3].strip()})."]
        lines.append(f"  output  {path}" + (", which ends:" if tail else ", which is empty"))
        lines += [f"    | {line}" for line in tail]
    else:
        lines = ["tokenscale: the ranks did not run to their end."]
    lines += [f"    srun | {line}" for line in output.splitlines()[-5:]]
    if found := find_hint(rank_text, output):
        lines += [f"  cause   {found.what}", f"  next    {found.next}"]
    return "\n".join(lines)


#: calls in which a rank waits for others: collectives, device synchronisation, and backward, at
#: whose end DDP waits
WAIT_CALLS = re.compile(
    r"torch/(?:distributed|cuda|autograd)/|/parallel/\w+\.py\", line \d+ in (?:sum|barrier|wait)"
)
#: numbers of stack lines and of ranks to show
MAX_LINES = 8
SHOWN_RANKS = 4


def describe_hang(attempt: Path, world_size: int) -> str | None:
    """Return a report of the hang: the rank that blocked, its stack, and the ranks that waited.
    None without stacks.
    """
    stacks = _read_stacks(attempt, world_size)
    if not stacks:
        return None
    waiting = [rank for rank, lines in stacks.items() if _is_waiting(lines)]
    silent = [rank for rank in range(world_size) if rank not in stacks]
    stuck = [rank for rank in stacks if rank not in waiting]
    lines = ["tokenscale: the run made no progress and was ended."]
    if silent:
        why = "wrote no stack: it is stopped, blocked on a disk, or its node is gone"
        lines.append(f"  rank {few(silent, shown=SHOWN_RANKS)}  {why}")
    for rank in stuck[:SHOWN_RANKS]:
        lines += _show_stack(rank, state="is stuck here:", stack=stacks[rank])
    if len(stuck) > SHOWN_RANKS:
        lines.append(f"  {len(stuck) - SHOWN_RANKS:,} more ranks are stuck")
    if not stuck and not silent:
        state = "waits, as all ranks do, for a message that never came:"
        lines += _show_stack(waiting[0], state, stack=stacks[waiting[0]])
    elif waiting:
        lines.append(f"  waiting for it: rank {few(waiting, shown=SHOWN_RANKS)}")
    lines.append(f"  stacks  {attempt}/rank=*/stacks.txt")
    again = (
        "start it again: it resumes from its newest state. Raise `hang_s` in machine.toml if a "
        "rank was busy"
    )
    return "\n".join([*lines, f"  next    {again}"])


def _read_stacks(attempt: Path, world_size: int) -> dict[int, list[str]]:
    """Return rank → the stack of its training thread, of the ranks that wrote one."""
    stacks = {}
    for rank in range(world_size):
        if text := read_text(attempt / f"rank={rank:05d}/stacks.txt"):
            stacks[rank] = extract_main_thread(text)
    return stacks


def _is_waiting(stack: list[str]) -> bool:
    """Return whether a rank waits for others, by the innermost lines of its stack."""
    return any(WAIT_CALLS.search(line) for line in stack[:MAX_LINES])


def _show_stack(rank: int, state: str, stack: list[str]) -> list[str]:
    return [f"  rank {rank}  {state}", *(f"    | {line}" for line in stack[:MAX_LINES])]


def extract_main_thread(text: str) -> list[str]:
    """Return the stack lines of the training thread, innermost call first."""
    blocks = re.split(r"(?m)^(?:Current t|T)hread .*$", text)[1:]
    lines = [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]
    trains = [block for block in lines if any("loop.py" in line for line in block)]
    return (trains or lines or [[]])[-1]
