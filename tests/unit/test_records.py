import contextlib
import errno
import json
import os
import subprocess

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_record, sha256_text, write_sealed
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import VERSION, Writer


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_with_its_schema_and_what_is_no_number_is_flagged(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenscale.runs.records.events.FLUSH_LINES", 2)
    writer = Writer(tmp_path)
    with pytest.raises(ValueError, match="colour"):
        writer.step(step=0, colour=1)
    writer.event("run_stop", status="complete")
    assert lines(tmp_path / "events.jsonl")[0]["status"] == "complete", "before it is closed"
    writer.step(step=0, loss_sum=2.5, useful_tokens=3)
    writer.step(step=1, loss_sum=float("nan"), grad_norm=float("inf"))
    assert len(lines(tmp_path / "steps.jsonl")) == 2
    writer.close()
    assert lines(tmp_path / "steps.jsonl") == [
        {"schema": VERSION, "step": 0, "loss_sum": 2.5, "useful_tokens": 3},
        {"schema": VERSION, "step": 1, "loss_sum": None, "nonfinite": True, "grad_norm": None},
    ]


@pytest.mark.parametrize("taken", [0, 1, 30, 10**6])
def test_lines_that_a_full_disk_took_in_part_are_written_once(tmp_path, monkeypatch, taken):
    writer = Writer(tmp_path / "a/rank=00000")
    write = os.write
    limits = [taken]

    def fill_up(descriptor, data):
        if not limits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data)[: limits.pop()])

    for step in range(3):
        writer.step(step=step)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fill_up)
        with contextlib.suppress(OSError):
            writer.flush()
    writer.close()
    lines = (writer.directory / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_dirty_tree_s_diff_holds_new_files_and_files_of_any_encoding(tmp_path, monkeypatch):
    """What the commit of a record lacks is beside it: `git apply dirty.diff` makes the tree that
    was run.
    """

    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.check_output(["git", *who, *arguments], cwd=tmp_path, text=True)

    package = tmp_path / "package/records"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    git("init", "--quiet")
    (package / "old.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    clean = {"dirty": False, "changed": [], "changes_sha256": None, "diff_sha256": None}
    assert provenance.read_git_state() == (
        {"commit": git("rev-parse", "HEAD").strip(), **clean},
        "",
    )
    (package / "old.py").write_bytes("a = 'é'\n".encode("latin-1"))
    (package / "new module.py").write_text("b = 2\n")
    names = ["package/records/new module.py", "package/records/old.py"]
    state, diff = provenance.read_git_state()
    assert (state["dirty"], state["changed"], state["diff_sha256"], diff) == (True, names, None, "")
    monkeypatch.setenv("TOKENSCALE_KEEP_DIFF", "1")
    kept, diff = provenance.read_git_state()
    assert kept == state | {"diff_sha256": sha256_text(diff)} and kept[
        "changes_sha256"
    ] == sha256_text(diff)
    assert "new file mode" in diff and "+b = 2" in diff and "-a = 1" in diff
    git("checkout", "--quiet", "package/records/old.py")
    (package / "new module.py").unlink()
    (tmp_path / "dirty.diff").write_text(diff)
    git("apply", "--include=*new module.py", "dirty.diff")
    assert (package / "new module.py").read_text() == "b = 2\n"


@pytest.mark.parametrize(
    ("record", "unsealed", "read"),
    [
        ({"a": 1}, False, False),
        ({"a": 1}, True, True),
        ({"a": 1, "seal": "0" * 64}, False, False),
        ({"a": 1, "seal": "0" * 64}, True, False),
        ([1], False, False),
        ([1], True, False),
        (None, True, False),
    ],
)
def test_a_record_is_read_with_its_seal_or_without_one_where_that_is_allowed(
    tmp_path, record, unsealed, read
):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    changed = pytest.raises(UserError, match="the record has changed since it was written")
    with contextlib.nullcontext() if read else changed:
        assert read_record(path, what="record", unsealed=unsealed) == record
    write_sealed(path, record={"a": 1})
    assert read_record(path, what="record", unsealed=unsealed) == {"a": 1}
