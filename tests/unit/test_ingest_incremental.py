"""The second ingest: only what has changed is read, and the files have the bytes of a first one."""

import json
import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import logs
from tests.unit.test_sql_epochs import write_store
from tokenscale.analysis import ingest as module
from tokenscale.analysis import ingest_cache as kept
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.tables import TABLES
from tokenscale.base.files import write_json
from tokenscale.cli import main as cli


@pytest.fixture
def lab(tmp_path):
    """Three runs on two ranks each, one of them resumed and one with a broken line, and what ingest read of them."""
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

    def tables(self, name="tables", keep=True, threads=2) -> dict[str, bytes]:
        output = self.root / name
        known = self.root / ".kept" if keep else None
        ingest(self.table, self.root / "runs", output, [self.root / "bench.json"], kept=known, threads=threads)
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


def test_an_unchanged_ingest_reads_nothing_and_gives_the_same_files(lab, read):
    first = lab.tables()
    assert len(read) == 3
    for path in (lab.root / "tables").iterdir():
        os.utime(path, (1e9, 1e9))
        path.unlink()  # as Snakemake does before it runs a rule
    assert lab.tables() == first
    assert len(read) == 3
    assert all(path.stat().st_mtime > 1e9 for path in (lab.root / "tables").iterdir())


def test_only_the_changed_run_is_read(lab, read):
    lab.tables()
    with open(lab.log(0), "ab") as file:
        file.write(b"rubbish\n")
    del read[:]
    again = lab.tables()
    assert read == [lab.runs[0].identity]
    assert again == lab.tables("afresh", keep=False)
    reasons = {r["run_id"]: r["reasons"] for r in pq.read_table(lab.root / "tables/runs.parquet").to_pylist()}
    assert "1 broken log line" in reasons[lab.runs[0].identity]


def test_a_log_of_the_same_size_and_another_time_is_read_again(lab, read):
    lab.tables()
    found = lab.log(1).stat()
    os.utime(lab.log(1), ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    del read[:]
    lab.tables()
    assert read == [lab.runs[1].identity]


def test_a_run_that_is_added_taken_away_or_listed_in_another_cell(lab, read):
    lab.tables()
    del read[:]
    new = logs.settings(world_size=2, repeat=3, steps=10)
    lab.table = logs.write_table(lab.root / "runs.json", [*lab.runs[1:], new])
    entries = json.loads(lab.table.read_text())
    entries["runs"][0]["position"] = 17  # was 1
    lab.table.write_text(json.dumps(entries))
    again = lab.tables()
    # the last one kept its place in the file, but not in the order of starting
    assert sorted(read) == sorted([new.identity, lab.runs[1].identity, lab.runs[2].identity])
    assert again == lab.tables("afresh", keep=False)


def test_another_benchmark_leaves_the_runs_unread(lab, read):
    lab.tables()
    del read[:]
    logs.write_benchmark(lab.root / "bench.json", rounds=4)
    again = lab.tables()
    assert read == [] and again == lab.tables("afresh", keep=False)


def test_stores_are_listed_and_read_again_when_their_build_is_another(lab, read):
    store = write_store(lab.root / "web/bpe/packed", build={"duration_s": 2.0, "engine": "bpe", "parts_taken_over": 0})
    corpus = lab.root / "corpus.json"
    write_json(corpus, {"splits": {}})
    call = {"stores": [store], "corpora": [corpus], "kept": lab.root / ".kept"}

    def seconds():
        ingest(lab.table, lab.root / "runs", lab.root / "tables", **call)
        return pq.read_table(lab.root / "tables/stores.parquet")["seconds"].to_pylist()

    assert seconds() == [2.0]
    del read[:]
    build = store.with_name("build.json")
    build.write_text(build.read_text().replace("2.0", "33.0"))
    assert seconds() == [33.0] and read == []
    store.with_name("build.json").unlink()
    assert seconds() == [None] and read == []


@pytest.mark.parametrize("harm", ["code", "no record", "damaged record", "cut table", "no table"])
def test_what_was_kept_of_other_code_or_is_damaged_is_made_anew(lab, read, monkeypatch, harm):
    first = lab.tables()
    del read[:]
    known = lab.root / ".kept"
    if harm == "code":
        monkeypatch.setattr(kept, "code", lambda: "other code")
    elif harm == "no record":
        (known / "made_of.json").unlink()
    elif harm == "damaged record":
        (known / "made_of.json").write_text('{"code": ')
    elif harm == "no table":
        (known / "steps.parquet").unlink()
    else:
        part = (known / "steps.parquet").read_bytes()[:-10]
        (known / "steps.parquet").unlink()  # the same file as the one in `tables`
        (known / "steps.parquet").write_bytes(part)
    assert lab.tables() == first
    assert len(read) == 3


def test_threads_change_nothing(lab):
    assert lab.tables("one", keep=False, threads=1) == lab.tables("four", keep=False, threads=4)


def test_tables_cannot_be_harmed_through_what_is_kept(lab):
    """Both are one file; a new ingest must replace it rather than write into it."""
    first = lab.tables()
    lab.log(0).write_bytes(lab.log(0).read_bytes() + b"rubbish\n")
    before = {p.name: p.read_bytes() for p in (lab.root / ".kept").iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept.Kept, "take", lambda *_: None)  # as if it were killed before
        assert lab.tables() != first
    assert before == {p.name: p.read_bytes() for p in (lab.root / ".kept").iterdir()}


def test_links_that_cannot_be_made_are_copies(lab, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    first = lab.tables("one", keep=False)
    monkeypatch.setattr(kept.os, "link", refuse)
    assert lab.tables("two") == first
    assert lab.tables("three") == first


def test_the_workflow_declares_every_table():
    rules = (Path(__file__).parents[2] / "workflow/rules/common.smk").read_text()
    declared = re.search(r"TABLES = \[.*?for name in \((.*?)\)", rules, re.S)[1]
    assert sorted(re.findall(r'"(\w+)"', declared)) == sorted(TABLES)


def test_the_verb_keeps_beside_the_tables_and_afresh_reads_all(lab, read, capsys):
    call = ["ingest", "--experiment", str(lab.table), "--runs", str(lab.root / "runs")]
    call += ["--output", str(lab.root / "out/demo")]
    assert cli.main(call) == 0 and len(read) == 3
    assert cli.main(call) == 0 and len(read) == 3
    assert (lab.root / "out/.demo.kept/made_of.json").is_file()
    assert cli.main([*call, "--afresh"]) == 0 and len(read) == 6
    said = capsys.readouterr().out.splitlines()
    assert len(set(said)) == 1 and "3 runs" in said[0] and "4 attempts" in said[0]
