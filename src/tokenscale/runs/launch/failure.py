"""What ranks of an srun left when they failed: which one was the first, the end of its output, the cause in words."""

import re
from pathlib import Path

from tokenscale.runs.launch.failure_hints import hint

#: file of srun's own words, beside the ranks' output
SRUN = "srun.log"
#: lines of a rank's output that are shown
TAIL = 20
#: srun's word on a task that ended badly: `srun: error: nid000002: task 5: Exited with exit code 1`
ENDED = re.compile(r"error: (\S+): tasks? (\d+)[^:]*: (.+)")


def first_failed(said: str) -> tuple[int, str, str] | None:
    """(rank, node, how) of the first task that srun names; those after it are ended on its account.

    >>> first_failed("srun: error: nid2: task 5: Exited with exit code 1\\nsrun: error: nid1: tasks 0-3: Killed")
    (5, 'nid2', 'Exited with exit code 1')
    """
    found = ENDED.search(said)
    return (int(found[2]), found[1], found[3].strip()) if found else None


def told(outputs: Path) -> str:
    """For a person: who failed first and where its output is, its last lines, the cause, the next step."""
    said = _text(outputs / SRUN)
    first = first_failed(said)
    lines = []
    rank_text = ""
    if first is not None:
        rank, node, how = first
        path = outputs / f"rank={rank:05d}.log"
        rank_text = _text(path)
        tail = rank_text.splitlines()[-TAIL:]
        lines.append(f"tokenscale: rank {rank} on {node} failed first ({how}).")
        lines.append(f"  output  {path}" + (", which ends:" if tail else ", which is empty"))
        lines += [f"    | {line}" for line in tail]
    else:
        lines.append("tokenscale: the ranks did not run to their end.")
    lines += [f"    srun | {line}" for line in said.splitlines()[-5:]]
    found = hint(rank_text, said)
    if found is not None:
        lines += [f"  cause   {found.what}", f"  next    {found.next}"]
    return "\n".join(lines)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
