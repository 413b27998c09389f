"""Find the rank that the others waited for in a hang, from the stacks that ranks dumped."""

import re
from pathlib import Path

#: calls in which a rank waits for others: collectives, device synchronisation, and backward, at whose end DDP waits
WAIT_CALLS = re.compile(r"torch/(?:distributed|cuda|autograd)/|/parallel/\w+\.py\", line \d+ in (?:sum|barrier|wait)")
#: number of stack lines to show
MAX_LINES = 8


def describe_hang(attempt: Path, world_size: int) -> str | None:
    """Return a report of the hang: the rank that blocked, its stack, and the ranks that waited. None without stacks."""
    stacks = {}
    for rank in range(world_size):
        path = attempt / f"rank={rank:05d}/stacks.txt"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if text.strip():
            stacks[rank] = extract_main_thread(text)
    if not stacks:
        return None
    waiting = [rank for rank, lines in stacks.items() if any(WAIT_CALLS.search(line) for line in lines[:MAX_LINES])]
    silent = [rank for rank in range(world_size) if rank not in stacks]
    stuck = [rank for rank in stacks if rank not in waiting]
    lines = ["tokenscale: the run made no progress and was ended."]
    for rank in silent:
        lines.append(f"  rank {rank}  wrote no stack: it is stopped, blocked on a disk, or its node is gone")
    for rank in stuck or ([] if silent else waiting[:1]):
        state = "is stuck here:" if rank in stuck else "waits, as all ranks do, for a message that never came:"
        lines.append(f"  rank {rank}  {state}")
        lines += [f"    | {line}" for line in stacks[rank][:MAX_LINES]]
    if waiting and (silent or stuck):
        lines.append(f"  waiting for it: rank {', '.join(map(str, waiting))}")
    lines.append(f"  stacks  {attempt}/rank=*/stacks.txt")
    lines.append(
        "  next    start it again: it resumes from its newest state. Raise `hang_s` in machine.toml if a rank was busy"
    )
    return "\n".join(lines)


def extract_main_thread(text: str) -> list[str]:
    """Return the stack lines of the training thread, innermost call first.

    >>> extract_main_thread('Thread 0x1 (most recent call first):\\n  File "a.py", line 1 in wait\\n\\n'
    ...     'Thread 0x2 (most recent call first):\\n  File "b.py", line 2 in f\\n  File "loop.py", line 3 in step\\n')
    ['File "b.py", line 2 in f', 'File "loop.py", line 3 in step']
    """
    blocks = re.split(r"(?m)^(?:Current t|T)hread .*$", text)[1:]
    lines = [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]
    trains = [block for block in lines if any("loop.py" in line for line in block)]
    return (trains or lines or [[]])[-1]
