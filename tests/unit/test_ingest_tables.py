"""Tables of several runs: every call reads all logs, and equal logs give equal bytes."""

import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import logs
from tests.unit.test_sql_epochs import write_store
from tokenscale.analysis import ingest as module
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.tables import TABLES
from tokenscale.base.files import write_json
from tokenscale.cli import main as cli


@pytest.fixture
def lab(tmp_path):
    """Three runs on two ranks each, one of them resumed and one with a broken line."""
    runs = [logs.settings(world_size=2, repeat=r, steps=10) for r in range(3)]
    logs.write_run(tmp_path / "runs", runs[0])
    logs.write_run(tmp_path / "runs", runs[1], attempts=[{"stop": 6, "stopped": False}, {"start": 4}])
    folder = logs.write_run(tmp_path / "runs", runs[2])
    with open(folder / "attempt=00/rank=00001/steps.jsonl", "ab") as file:
        file.write(b'{"schema":1,"ste')
    logs.write_benchmark(tmp_path / "bench.json")
    return Lab(tmp_path, runs)


class Lab:
    def __init__(self, root: Path, runs):
        self.root, self.runs = root, runs
        self.table = logs.write_table(root / "runs.json", runs)

    def tables(self, name="tables", threads=2) -> dict[str, bytes]:
        output = self.root / name
        ingest(self.table, self.root / "runs", output, [self.root / "bench.json"], threads=threads)
        return {path.name: path.read_bytes() for path in sorted(output.iterdir())}

    def log(self, run, rank=0) -> Path:
        return self.root / "runs" / self.runs[run].identity / f"attempt=00/rank={rank:05d}/steps.jsonl"


@pytest.fixture
def read(monkeypatch):
    """Ids of the runs that were read."""
    found = []
    original = module.one_run
    monkeypatch.setattr(module, "one_run", lambda entry, *rest: found.append(entry["run_id"]) or original(entry, *rest))
    return found


def test_every_call_reads_all_logs_and_gives_the_same_files(lab, read):
    first = lab.tables()
    assert len(read) == 3
    for path in (lab.root / "tables").iterdir():
        os.utime(path, (1e9, 1e9))
    assert lab.tables() == first
    assert len(read) == 6
    assert all(path.stat().st_mtime > 1e9 for path in (lab.root / "tables").iterdir())


def test_a_change_that_keeps_size_and_time_of_a_log_is_read(lab):
    before = lab.tables()
    log = lab.log(0)
    found, content = log.stat(), log.read_bytes()
    log.write_bytes(b"x" + content[1:])
    os.utime(log, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert lab.tables() != before
    reasons = {r["run_id"]: r["reasons"] for r in pq.read_table(lab.root / "tables/runs.parquet").to_pylist()}
    assert "1 broken log line" in reasons[lab.runs[0].identity]


def test_stores_are_listed_with_the_build_that_lies_beside_them(lab):
    store = write_store(lab.root / "web/bpe/packed", build={"duration_s": 2.0, "engine": "bpe", "parts_taken_over": 0})
    corpus = lab.root / "corpus.json"
    write_json(corpus, {"splits": {}})

    def seconds():
        ingest(lab.table, lab.root / "runs", lab.root / "tables", stores=[store], corpora=[corpus])
        return pq.read_table(lab.root / "tables/stores.parquet")["seconds"].to_pylist()

    assert seconds() == [2.0]
    build = store.with_name("build.json")
    build.write_text(build.read_text().replace("2.0", "33.0"))
    assert seconds() == [33.0]
    store.with_name("build.json").unlink()
    assert seconds() == [None]


def test_threads_change_nothing(lab):
    assert lab.tables("one", threads=1) == lab.tables("four", threads=4)


def test_the_workflow_declares_every_table():
    rules = (Path(__file__).parents[2] / "workflow/rules/common.smk").read_text()
    declared = re.search(r"TABLES = \[.*?for name in \((.*?)\)", rules, re.S)[1]
    assert sorted(re.findall(r'"(\w+)"', declared)) == sorted(TABLES)


def test_the_command_prints_row_counts_and_leaves_only_the_tables(lab, read, capsys):
    call = ["ingest", "--experiment", str(lab.table), "--runs", str(lab.root / "runs")]
    call += ["--output", str(lab.root / "out/demo")]
    assert cli.main(call) == 0 and cli.main(call) == 0 and len(read) == 6
    assert [path.name for path in (lab.root / "out").iterdir()] == ["demo"]
    said = capsys.readouterr().out.splitlines()
    assert len(set(said)) == 1 and "3 runs" in said[0] and "4 attempts" in said[0]
