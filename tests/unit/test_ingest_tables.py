"""Tables of several runs: equal logs give equal bytes, whichever of their runs are read again."""

import os
import random
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import logs
from tests.corpora import flip_bit
from tests.logs import tabulate
from tests.refusals import refused
from tokenscale.analysis import ingest as module
from tokenscale.analysis import kept_file, kept_tables, run_folder
from tokenscale.analysis.queries import connect, query
from tokenscale.analysis.recount import Recount
from tokenscale.analysis.tables import (
    EXPERIMENT,
    MANIFEST,
    TABLES,
    read_experiment,
    write,
    write_manifest,
)
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json, write_sealed
from tokenscale.cli import main as cli
from tokenscale.cli.verify import verify_results
from tokenscale.referee import validity


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

    def tables(self, name="tables", **options) -> dict[str, bytes]:
        output = self.root / name
        tabulate(self.table, self.root / "runs", output, [self.benchmark], **options)
        return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Its first two runs are a block, and the third is one."""
    monkeypatch.setattr(kept_tables, "BLOCK_RUNS", 2)
    return Lab(tmp_path)


@pytest.fixture
def read(monkeypatch):
    found = []
    original = module.read_contents
    monkeypatch.setattr(
        module,
        "read_contents",
        lambda folder, **others: found.append(folder.name) or original(folder, **others),
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


def edit_entry(lab, name):
    table = read_json(lab.table)
    for entry in table["runs"]:
        if entry["run_id"] == name:
            entry["cell"] = {**entry["cell"], "seed": 3}
    write_sealed(lab.table, table)


def edit_log(lab, name):
    path = lab.root / "runs" / name / "attempt=00/rank=00001/steps.jsonl"
    facts = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


def first_file(lab):
    """The file of the block that this run begins."""
    return lab.root / "kept/first.arrow"


def cut_file(lab, name):
    path = first_file(lab)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_head(lab, name):
    path = first_file(lab)
    path.write_bytes(path.read_bytes().replace(b'[["runs", ', b"[[", 1))


def rewrite_kept(lab, name, old, new):
    """Edit a kept file, and write the digest of its new content."""
    path = first_file(lab)
    content = path.read_bytes().partition(b"\n")[2].replace(old, new, 1)
    path.write_bytes(kept_file._hash(content).encode() + b"\n" + content)


def break_seal(lab, name):
    path = lab.root / "runs" / name / "run.json"
    write_json(path, {**read_json(path), "number_format": "fp8"})


CHANGES = {
    "nothing": lambda lab, name: None,
    "its entry in the run table": edit_entry,
    "a line of its log": edit_log,
    "a link that leads nowhere": lambda lab, name: (lab.root / "runs" / name / "latest").symlink_to(
        "gone"
    ),
    "a file without its end": cut_file,
    "an empty file": lambda lab, name: first_file(lab).write_bytes(b""),
    "a file that is gone": lambda lab, name: first_file(lab).unlink(),
    "a flipped bit": lambda lab, name: flip_bit(first_file(lab), 4000),
    "another block's file": lambda lab, name: shutil.copy(
        next(path for path in (lab.root / "kept").glob("after-*")), first_file(lab)
    ),
    "fewer tables in its head": edit_head,
    "a file of another schema": lambda lab, name: rewrite_kept(
        lab, name, b'"inputs": ', b'"facts": '
    ),
    "a file of other sources": lambda lab, name: rewrite_kept(
        lab, name, b'"sources": "', b'"sources": "0'
    ),
}
#: changes of the file of a block, of which all runs are then read again
OF_A_BLOCK = (
    "a file without its end",
    "an empty file",
    "a file that is gone",
    "a flipped bit",
    "another block's file",
    "fewer tables in its head",
)


#: changes that are judged anew, without reading
NOT_READ = ("nothing", "its entry in the run table", "a link that leads nowhere")


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_run_that_changed_is_read_again_and_the_tables_are_those_of_all_logs(
    lab, read, change
):
    kept = lab.root / "kept"
    lab.tables(kept=kept)
    read.clear()
    runs = sorted(path.name for path in (lab.root / "runs").iterdir())
    CHANGES[change](lab, runs[0])
    again = lab.tables(kept=kept)
    changed = runs[:2] if change in OF_A_BLOCK else runs[:1]
    assert read == ([] if change in NOT_READ else changed)
    assert again == lab.tables("whole")
    read.clear()
    assert lab.tables(kept=kept) == again and read == []


def test_one_new_run_costs_its_own_reading_and_a_run_that_left_is_forgotten(lab, read):
    kept = lab.root / "kept"
    lab.tables(kept=kept)
    read.clear()
    table = read_json(lab.table)
    new = logs.settings(world_size=2, repeat=3, steps=10)
    logs.write_run(lab.root / "runs", new)
    entries = read_json(logs.write_table(lab.root / "more.json", [new]))["runs"]
    table["runs"] = table["runs"][1:] + entries
    write_sealed(lab.table, table)
    lab.tables(kept=kept)
    assert read == [new.identity]
    files = {path.stem: kept_file.read_kept(path)[0]["runs"] for path in kept.glob("*.arrow")}
    assert {name for runs in files.values() for name in runs} == {
        run["run_id"] for run in table["runs"]
    }


def test_a_run_that_is_not_sealed_is_read_each_time(lab, read):
    run = logs.settings(world_size=2, repeat=3, steps=10)
    record = lab.root / "runs" / run.identity / "run.json"
    logs.write_run(lab.root / "runs", run)
    write_json(record, {**read_json(record), "status": "running"})
    logs.write_table(lab.table, [run])
    for _ in range(2):
        lab.tables(kept=lab.root / "kept")
    assert read == [run.identity] * 2


def test_a_broken_seal_is_told_and_its_run_read_each_time(lab, read):
    kept = lab.root / "kept"
    lab.tables(kept=kept)
    name = min(path.name for path in (lab.root / "runs").iterdir())
    break_seal(lab, name)
    for _ in range(2):
        read.clear()
        assert lab.tables(kept=kept) == lab.tables("whole") and read.count(name) == 2


@pytest.fixture
def judged(monkeypatch):
    found = []
    original = validity.judge_run
    monkeypatch.setattr(
        validity,
        "judge_run",
        lambda row, *others: found.append(row["run_id"]) or original(row, *others),
    )
    return found


@pytest.mark.parametrize(
    "edited, runs_read, runs_judged",
    [
        ("referee/run_values.py", 0, 3),
        ("referee/steadiness.py", 0, 3),
        ("analysis/steps.py", 3, 3),
        ("analysis/logs.py", 3, 0),
        ("data/stores/packed.py", 3, 0),
        ("train/loop.py", 0, 0),
    ],
)
def test_other_code_that_judges_reads_no_run_again_and_other_code_that_reads_all(
    lab, read, judged, monkeypatch, edited, runs_read, runs_judged
):
    lab.tables(kept=lab.root / "kept")
    original = kept_tables.hash_closure

    def edit(*modules):
        found = original(*modules)
        name = f"tokenscale/{edited}"
        return {**found, name: "0" * 64} if name in found else found

    monkeypatch.setattr(kept_tables, "hash_closure", edit)
    monkeypatch.setattr(validity, "hash_closure", edit)
    read.clear()
    judged.clear()
    lab.tables(kept=lab.root / "kept")
    assert (len(read), len(judged)) == (runs_read, runs_judged)


def test_a_run_whose_inputs_could_not_be_read_is_read_each_time(lab, read, monkeypatch):
    monkeypatch.setattr(run_folder, "count_again", lambda *_, **__: Recount(failed=True))
    for _ in range(2):
        read.clear()
        lab.tables(kept=lab.root / "kept")
        assert len(read) == 3


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("records", "record", "{"),
        ("records", "entry", None),
        ("records", "hashes", "[]"),
        ("recounts", "recount", "{}"),
    ],
)
def test_tables_of_other_hands_without_what_a_run_is_judged_by_are_named(
    lab, monkeypatch, capsys, table, column, value
):
    monkeypatch.chdir(lab.root)
    lab.tables("results/tables/demo")
    folder = Path("results/tables/demo")
    rows = pq.read_table(folder / f"{table}.parquet").to_pylist()
    rows[0][column] = value
    write(folder / f"{table}.parquet", table, rows)
    write_manifest(folder)
    before = (folder / "validity.parquet").read_bytes()
    told = ["validate", "--experiment", str(lab.table), "--tables", str(folder)]
    assert cli.main(told) == 2
    error = capsys.readouterr().err
    assert str(folder / "records.parquet") in error and rows[1]["run_id"][:4] in error
    assert (folder / "validity.parquet").read_bytes() == before


def rename_first(rows):
    return [rows[0] | {"run_id": "another"}, *rows[1:]]


@pytest.mark.parametrize(
    "table, edit",
    [
        *((table, lambda rows: rows[::-1]) for table in ("steps", "events", "attempts", "records")),
        ("recounts", rename_first),
    ],
)
def test_tables_with_their_runs_in_another_order_are_refused(lab, monkeypatch, capsys, table, edit):
    """Runs behind the first that is elsewhere would have no rows."""
    monkeypatch.chdir(lab.root)
    lab.tables("results/tables/demo")
    folder = Path("results/tables/demo")
    rows = pq.read_table(folder / f"{table}.parquet").to_pylist()
    write(folder / f"{table}.parquet", table, edit(rows))
    write_manifest(folder)
    told = ["validate", "--experiment", str(lab.table), "--tables", str(folder)]
    assert cli.main(told) == 2
    assert f"another order than in runs.parquet: {table}.parquet" in capsys.readouterr().err


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
            with pytest.raises(UserError, match="changed since it was written"):
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
        ["report", "description", "--tables", "results/tables/demo", "--output", "out"],
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
        "a table has changed since it was written" in error
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
        with pytest.raises(UserError, match="changed since it was written"):
            query("throughput", connection)
