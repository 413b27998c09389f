"""What `doctor` says of cores and memory, and of control groups that limit them."""

import pytest

from tests.machines import asked
from tokenscale.cli import doctor_checks
from tokenscale.runs.records import provenance


def group_tree(root, lines, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    "lines, files, limits",
    [
        (["0::/job"], {"job/cpu.max": "250000 100000", "job/memory.max": "8589934592"}, (2.5, 8 * 2**30)),
        (["0::/job/step"], {"job/memory.max": "1000", "job/step/memory.max": "max"}, (None, 1000)),  # the parent limits
        (["0::/"], {"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        (["0::/not/visible"], {"memory.max": "5000", "cpu.max": "50000 100000"}, (0.5, 5000)),  # inside a container
        ([], {}, (None, None)),
    ],
)
def test_control_groups_limit_cores_and_memory(tmp_path, lines, files, limits):
    assert provenance.cgroup_limits(group_tree(tmp_path, lines, files)) == limits


@pytest.mark.parametrize("affinity, quota, usable", [(8, None, 8), (8, 2.5, 3), (2, 16.0, 2), (4, 0.2, 1)])
def test_usable_cores_are_those_that_work_at_once(affinity, quota, usable):
    assert provenance.usable_cores(affinity, quota) == usable


def test_fewer_cores_than_are_visible_is_a_note(monkeypatch):
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (1.5, None))
    monkeypatch.setattr(provenance, "count_affinity_cores", lambda: 16)
    found = doctor_checks.check_cores(asked())
    assert found.verdict == "note" and found.values["usable"] == 2 and "--cores 2" in found.next


@pytest.mark.parametrize("limit, verdict", [(None, "ok"), (2**30, "no"), (2 * 2**30, "note")])
def test_the_memory_that_counts_is_what_a_control_group_leaves(monkeypatch, limit, verdict):
    monkeypatch.setattr(doctor_checks.provenance, "read_memory", lambda: (64 * 2**30, 60 * 2**30))
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, limit))
    found = doctor_checks.check_memory(asked())
    assert found.verdict == verdict and found.fact.startswith("64.0 GiB")
