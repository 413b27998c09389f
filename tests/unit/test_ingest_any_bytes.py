"""Logs and records that anything may stand in: a row, or counted as broken; never an exception."""

import random

import pytest

from tests import logs as written_logs
from tests.harm import edited, harmed
from tokenscale.analysis.ingest import ingest
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json

pytestmark = pytest.mark.slow(31)


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
