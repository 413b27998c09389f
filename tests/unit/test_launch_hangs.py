"""Reports of a hang, whatever the number of ranks."""

import pytest

from tokenscale.runs.launch.failure_hints import describe_hang

WAITS, STUCK = 'File "torch/distributed/x.py", line 1 in wait', 'File "loop.py", line 9 in reading_for_ever'


@pytest.mark.parametrize("stack", [None, WAITS, STUCK])
def test_a_thousand_ranks_are_a_short_report(tmp_path, stack):
    for rank in range(1000):
        text = f"Current thread 0x1 (most recent call first):\n  {stack}\n" if rank != 3 else WAITS
        if stack or rank == 3:
            (tmp_path / f"rank={rank:05d}").mkdir()
            (tmp_path / f"rank={rank:05d}/stacks.txt").write_text(text)
    said = describe_hang(tmp_path, 1000)
    assert len(said) < 2000 and "rank 0" in said and "next" in said
