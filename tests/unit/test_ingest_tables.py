"""Tables of several runs: every call reads all logs, and equal logs give equal bytes."""

import os
import random
import re
from pathlib import Path

import pytest

from tests import logs
from tests.corpora import flip_bit
from tests.refusals import refused
from tokenscale.analysis import ingest as module
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import connect, query
from tokenscale.analysis.tables import EXPERIMENT, MANIFEST, TABLES, read_experiment
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json
from tokenscale.cli import main as cli
from tokenscale.cli.verify import verify_results


class Lab:
    """Three runs on two ranks each, one of them resumed and one with a broken line."""

    def __init__(self, root: Path):
        self.root = root
        runs = [logs.settings(world_size=2, repeat=r, steps=10) for r in range(3)]
        logs.write_run(root / "runs", runs[0])
        logs.write_run(
            root / "runs", runs[1], attempts=[{"stop": 6, "stopped": False}, {"start": 4}]
        )
        with open(
            logs.write_run(root / "runs", runs[2]) / "attempt=00/rank=00001/steps.jsonl", "ab"
        ) as file:
            file.write(b'{"schema":1,"ste')
        self.benchmark = logs.write_benchmark(root / "bench.json")
        self.table = logs.write_table(root / "runs.json", runs)

    def tables(self, name="tables", threads=2) -> dict[str, bytes]:
        output = self.root / name
        ingest(self.table, self.root / "runs", output, [self.benchmark], threads=threads)
        return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


@pytest.fixture
def read(monkeypatch):
    found = []
    original = module.one_run
    monkeypatch.setattr(
        module,
        "one_run",
        lambda entry, **named: found.append(entry["run_id"]) or original(entry, **named),
    )
    return found


def test_every_call_reads_all_logs_and_gives_the_same_files_with_any_number_of_threads(lab, read):
    first = lab.tables()
    assert len(read) == 3
    for path in (lab.root / "tables").iterdir():
        os.utime(path, (1e9, 1e9))
    assert lab.tables() == first == lab.tables("one", threads=1) == lab.tables("four", threads=4)
    assert len(read) == 12 and all(
        path.stat().st_mtime > 1e9 for path in (lab.root / "tables").iterdir()
    )


def test_the_command_prints_row_counts_and_leaves_only_the_tables(lab, read, capsys):
    folders = ["--runs", str(lab.root / "runs"), "--output", str(lab.root / "out/demo")]
    assert cli.main(["ingest", "--experiment", str(lab.table), *folders]) == 0 and len(read) == 3
    assert [path.name for path in (lab.root / "out").iterdir()] == ["demo"]
    said = capsys.readouterr().out
    assert "3 runs" in said and "4 attempts" in said


def test_every_flipped_bit_is_refused_and_named_until_the_tables_are_ingested_again(lab):
    """100 bits, at least 5 in each file: of tables, of the experiment's description and of the
    manifest itself.
    """
    before = lab.tables("results/tables/demo")
    folder = lab.root / "results/tables/demo"
    draw = random.Random(23)
    for number in range(100):
        name = [*before][number % len(before)]
        data = bytearray(before[name])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(data)
        with pytest.raises(UserError) as refused:
            connect(folder)
        if name == EXPERIMENT:
            with pytest.raises(UserError, match="changed since ingest"):
                read_experiment(folder)
        found, counts = verify_results(lab.root / "results")
        assert counts["tables"] == 1 and found, name
        if name != MANIFEST:  # a changed hash in the manifest speaks of its table
            assert (
                refused.value.facts["path"] == str(folder / name)
                and str(folder / name) in found[0].what
            )
        (folder / name).write_bytes(before[name])
    assert not [finding for finding in verify_results(lab.root / "results")[0] if not finding.note]
    (folder / "steps.parquet").write_bytes(before["steps.parquet"][:-1])
    assert lab.tables("results/tables/demo") == before


@pytest.mark.parametrize(
    "command",
    [
        ["report", "page", "--experiments", "demo", "--output", "out"],
        ["claims", "--ledger", str(Path(__file__).parents[2] / "config/claims.yaml")],
        ["predict", "--tables", "results/tables/demo"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_refuse_a_table_with_one_flipped_bit(lab, monkeypatch, capsys, command):
    monkeypatch.chdir(lab.root)
    lab.tables("results/tables/demo")
    flip_bit(Path("results/tables/demo/steps.parquet"), 100)
    error = refused(capsys, command)
    assert (
        "a table has changed since ingest wrote it" in error
        and "results/tables/demo/steps.parquet" in error
    )
    assert "snakemake -f results/tables/demo/runs.parquet" in error


def newer(monkeypatch, lab):
    with monkeypatch.context() as patch:
        add_a_column(patch)
        lab.tables("results/tables/demo")


def add_a_column(monkeypatch):
    monkeypatch.setitem(TABLES, "runs", {**TABLES["runs"], "new": "BIGINT"})


OTHERS = {
    "an older version": lambda monkeypatch, lab, path: add_a_column(monkeypatch),
    "a newer version": lambda monkeypatch, lab, path: newer(monkeypatch, lab),
    "a version without manifests": lambda monkeypatch, lab, path: path.unlink(),
    "a table that is missing": lambda monkeypatch, lab, path: path.with_name(
        "steps.parquet"
    ).unlink(),
    "a manifest without a table": lambda monkeypatch, lab, path: write_json(
        path, read_json(path) | {"files": read_json(path)["files"][1:]}
    ),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_tables_of_another_version_name_the_command_that_makes_them_anew(
    lab, monkeypatch, capsys, other
):
    monkeypatch.chdir(lab.root)
    lab.tables("results/tables/demo")
    other(monkeypatch, lab, Path("results/tables/demo", MANIFEST))
    error = refused(capsys, ["predict", "--tables", "results/tables/demo"])
    assert re.search("next +snakemake -f results/tables/demo/runs.parquet", error)


def test_a_file_that_changes_while_a_connection_is_open_is_named(lab):
    lab.tables("tables")
    with connect(lab.root / "tables") as connection:
        path = lab.root / "tables/steps.parquet"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(UserError, match="changed since ingest"):
            query("throughput", connection)
