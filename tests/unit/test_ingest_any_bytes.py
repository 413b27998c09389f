"""Logs and records that anything may stand in: a row, or counted as broken; never an exception."""

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import logs as written_logs
from tests.harm import edited, harmed
from tokenscale.analysis import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json

pytestmark = pytest.mark.slow(31)

LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"\0\0", b"\xff\xfe", b"{", b"[" * 3000, b"NaN", b"\xef\xbb\xbf{}", b'{"step":1}', b'{"event":"x"}']
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["schema", "step", "event", "name", "loss_sum", "x"]), inner, max_size=4)
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(LINES, max_size=8), st.sampled_from(["steps", "spans", "events"]), st.sampled_from([1, 20, 1 << 20]))
@example([b'{"step":1,"loss_sum":' + b"9" * 5000 + b"}", b'{"step":2}'], "steps", 1 << 20)
@example([b'{"step":1}', b'{"step":' + b"[" * 2000 + b"]" * 2000 + b"}", b'{"step":3}'], "steps", 1 << 20)
@example([b'{"event":"\\ud800","step":1}'], "events", 1 << 20)
@example([b'{"step":1,"step":2}', b'{"step":1e400}', b'{"step":true}', b'{"step":-0}'], "steps", 1)
def test_any_bytes_are_rows_or_counted_as_broken(tmp_path_factory, lines, kind, block):
    path = tmp_path_factory.mktemp("any") / f"{kind}.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    written = path.read_bytes().split(b"\n")[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK_BYTES", block)
        found = logs.read_lines(path, kind)
    assert len(found.table) + len(found.broken) == len(written)
    for broken in found.broken:
        assert 1 <= broken["line"] <= len(written) and broken["reason"] and broken["text"].isprintable()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run of two ranks, and the table that lists it."""
    folder = tmp_path_factory.mktemp("demo")
    run = written_logs.settings(world_size=2)
    written_logs.write_run(folder / "runs", run)
    written_logs.write_table(folder / "runs.json", [run])
    return folder


def test_damaged_folders_of_runs_are_rows_that_say_so(demo, tmp_path):
    draw = random.Random(0)
    for _ in range(25):
        what = harmed(demo / "runs", tmp_path / "runs", draw)
        try:
            assert ingest(demo / "runs.json", tmp_path / "runs", tmp_path / "tables")["runs"] == 1, what
        except UserError as error:
            raise AssertionError(f"{what}: {error}") from error


def test_records_that_are_edited_anyhow_are_rows_that_say_so(demo, tmp_path):
    draw = random.Random(1)
    harmed(demo / "runs", tmp_path / "runs", random.Random(0))
    (path,) = (demo / "runs").glob("*/run.json")
    good = read_json(path)
    target = tmp_path / "runs" / path.parent.name / "run.json"
    for _ in range(30):
        record = edited(good, draw)
        write_json(target, record)
        assert ingest(demo / "runs.json", tmp_path / "runs", tmp_path / "tables")["runs"] == 1, record
