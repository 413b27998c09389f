"""Which rank the others waited for, from what ranks wrote of themselves when nothing went on any more."""

import re
from pathlib import Path

#: where a rank waits for others: in an exchange, for a device, or in the backward pass, at whose end DDP waits
WAITS = re.compile(r"torch/(?:distributed|cuda|autograd)/|/parallel/\w+\.py\", line \d+ in (?:sum|barrier|wait)")
#: lines of a stack that are shown
SHOWN = 8


def describe(attempt: Path, world_size: int) -> str | None:
    """For a person: who stood still, where, and who waited. None where no rank wrote a stack."""
    stacks = {}
    for rank in range(world_size):
        path = attempt / f"rank={rank:05d}/stacks.txt"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if text.strip():
            stacks[rank] = main_thread(text)
    if not stacks:
        return None
    waiting = [rank for rank, lines in stacks.items() if any(WAITS.search(line) for line in lines[:SHOWN])]
    silent = [rank for rank in range(world_size) if rank not in stacks]
    stuck = [rank for rank in stacks if rank not in waiting]
    lines = ["tokenscale: the run stood still, and was ended."]
    for rank in silent:
        lines.append(f"  rank {rank}  says nothing: stopped, waiting for a disk, or its node is gone")
    for rank in stuck or ([] if silent else waiting[:1]):
        where = "" if rank in stuck else ", as all do: for what never came"
        lines.append(f"  rank {rank}  {'is here' if rank in stuck else 'waits'}{where}")
        lines += [f"    | {line}" for line in stacks[rank][:SHOWN]]
    if waiting and (silent or stuck):
        lines.append(f"  waiting for it: rank {', '.join(map(str, waiting))}")
    lines.append(f"  stacks  {attempt}/rank=*/stacks.txt")
    lines.append(
        "  next    start it again: it goes on from its newest state; more `hang_s` in machine.toml if it was busy"
    )
    return "\n".join(lines)


def main_thread(text: str) -> list[str]:
    """The lines of the thread that trains, its innermost call first.

    >>> main_thread('Thread 0x1 (most recent call first):\\n  File "a.py", line 1 in wait\\n\\n'
    ...     'Thread 0x2 (most recent call first):\\n  File "b.py", line 2 in f\\n  File "loop.py", line 3 in step\\n')
    ['File "b.py", line 2 in f', 'File "loop.py", line 3 in step']
    """
    blocks = re.split(r"(?m)^(?:Current t|T)hread .*$", text)[1:]
    lines = [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]
    trains = [block for block in lines if any("loop.py" in line for line in block)]
    return (trains or lines or [[]])[-1]
