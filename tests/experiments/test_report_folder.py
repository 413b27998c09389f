import importlib.metadata
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import logs
from tests.logs import tabulate
from tests.once import once
from tests.tables import renew_manifests
from tests.tampering import change_logs, renew_sums, seal
from tokenscale import __version__
from tokenscale.analysis.tables import digest, write_verdict, writer
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from tokenscale.base.manifests import read_sums
from tokenscale.cli.main import main
from tokenscale.report import build, bundle, page, pdf, save, summary, verification
from tokenscale.report.packed_logs import LOGS
from tokenscale.report.table import Table, latex, markdown
from tokenscale.report.verification import verify

pytestmark = [pytest.mark.experiment, pytest.mark.slow(50)]

ROOT = Path(__file__).parents[2]
FIGURE = "data_stall_share"
FILES = {"workflow": ROOT / "workflow/Snakefile", "citation": ROOT / "CITATION.cff"}


#: claims that are judged here
LEDGER = {
    "documents": {"study": {"title": "A study"}},
    "claims": {
        "waits": {
            "document": "study",
            "claim": "runs wait for data",
            "sentence": "Waiting takes {number}.",
            "sql": "SELECT run_id, data_stall_share AS value FROM stalls",
            "experiments": ["demo"],
            "direction": "above",
            "bound": 0.9,
            "unit": "percent",
        }
    },
}


def report(results):
    """Figures and report below `results`, from `results/tables`."""
    write_json(results / "ledger.yaml", LEDGER)
    folders = (results / name for name in ("tables", "figures", "report"))
    build.write(["demo"], *folders, ledger=results / "ledger.yaml", **FILES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`results` with the tables and the report of one small experiment. Nobody may change it."""

    def make(folder):
        options = {
            "world_sizes": (1,),
            "repeats": 2,
            "approaches": ("padded", "packed"),
            "figures": [FIGURE],
        }
        table = logs.write_demo(folder, **options)
        for path in folder.glob("runs/*/run.json"):
            seal(path.parent)
        tabulate(table, folder / "runs", folder / "tables" / "demo", [folder / "bench.json"])
        report(folder)

    return once(tmp_path_factory, "report-folder", make)


@pytest.fixture
def results(made, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "results"))


def hashes(folder):
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_folder_holds_what_the_report_is_made_of(made):
    found = hashes(made / "report")
    for name in (
        "index.html",
        "report.pdf",
        "README.md",
        "CITATION.cff",
        "provenance.json",
        "logs.json.xz",
        "claims.json",
        "claims.yaml",
        *(f"figures/demo/{FIGURE}.{kind}" for kind in save.DRAWN),
        *(f"data/demo/{name}.{kind}" for name in (FIGURE, "cells") for kind in ("csv", "parquet")),
        "sql/throughput.sql",
        "tables/demo/throughput.md",
        "tables/demo/throughput.tex",
        "workflow/Snakefile",
    ):
        assert name in found
    del found[bundle.SUMS]
    assert read_sums(made / "report") == found


def test_what_no_longer_belongs_to_the_report_is_removed_and_a_missing_figure_named(results):
    stale = results / "report/figures/gone/old.svg"
    mine = results / "report/mine.html"
    stale.parent.mkdir()
    for path in (stale, mine):
        path.write_text("not of the bundle")
    drawing = results / f"report/figures/demo/{FIGURE}.svg"
    before = drawing.stat().st_ino
    part = summary.read(results / "figures/demo" / summary.FILE)
    where = ([part], results / "tables", results / "figures", results / "report")
    bundle.write(*where)
    assert not stale.parent.exists() and mine.is_file()
    assert drawing.stat().st_ino == before, "an equal file is not written again"
    (results / "figures" / "demo" / f"{FIGURE}.parquet").unlink()
    with pytest.raises(UserError, match=rf"{FIGURE}\.parquet[\s\S]*snakemake .*{FIGURE}\.svg"):
        bundle.write(*where)


def test_provenance_leads_from_a_figure_to_the_sealed_records_and_cells_say_what_runs_measured(
    made,
):
    record = read_json(made / "report" / "provenance.json")
    facts = record["experiments"]["demo"]["runs"]
    records = [read_json(path) for path in (made / "runs").glob("*/run.json")]
    assert {run: of["seal"] for run, of in facts.items()} == {
        r["run_id"]: r["seal"] for r in records
    }
    assert {of["commit"] for of in facts.values()} == {"0123456789abcdef0123456789abcdef01234567"}
    assert record["packages"].keys() >= {"matplotlib", "duckdb", "python"}
    assert record["experiments"]["demo"]["tables"] == digest(made / "tables/demo")
    rows = pq.read_table(made / "report/data/demo/cells.parquet").to_pandas().set_index("run_id")
    assert len(rows) == 4 and rows["seal"].notna().all()
    for run in (made / "runs").iterdir():
        steps = [
            json.loads(line)
            for line in (run / "attempt=00/rank=00000/steps.jsonl").read_text().splitlines()
        ][3:]
        rate = sum(s["useful_tokens"] for s in steps) / sum(s["step_s"] for s in steps)
        assert rows.loc[run.name, "useful_tokens_per_s"] == pytest.approx(rate)


# --- verification
# ---------------------------------------------------------------------------------------------------


def checked(report, expected, code=None, **options):
    """Check a report against (link, text) of each expected difference; return all that is said."""
    chain = verify(report, **options)
    found = [(name, text) for name, link in chain.links.items() for text in link.differs]
    for name, text in expected:
        assert any(link == name and text in said for link, said in found), (name, text, found)
    assert {name for name, _ in found} == {name for name, _ in expected}, found
    assert len(found) == len(expected) or code == "more", found
    assert chain.code == (1 if expected else code or 0)
    return str(chain)


@pytest.fixture
def quick(monkeypatch, made):
    """Take the report as it was built in place of building it again, which takes seconds."""

    def write(experiments, tables, figures, output, *, citation, **_):
        shutil.copytree(made / "report", output)
        shutil.copytree(made / "figures", figures)
        for name in ("provenance.json", "CITATION.cff"):
            shutil.copy(citation.parent / name, output)
        record = read_json(output / "provenance.json")
        record["experiments"]["demo"]["tables"] = digest(tables / "demo")
        write_json(output / "provenance.json", record)

    monkeypatch.setattr(build, "write", write)


def test_a_mailed_folder_proves_itself_without_its_project(made, tmp_path, monkeypatch, capsys):
    mailed = shutil.copytree(made / "report", tmp_path / "mail/report")
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "mail/report"]) == 0
    assert capsys.readouterr().out.count(": agrees\n") == 4
    text = (mailed / "README.md").read_text()
    commit = read_json(mailed / "provenance.json")["git"]["commit"]
    assert f"git checkout {commit} && pip install" in text and f"tokenscale {__version__}" in text
    assert "    tokenscale verify FOLDER" in text and "logs of 4 runs" in text
    for path, said in ((tmp_path / "none.svg", "no such file"), (tmp_path, "no report")):
        assert main(["verify", str(path)]) == 2
        assert said in capsys.readouterr().err


#: a file of each kind → the link of the chain that it belongs to
DERIVED = {
    **{f"figures/demo/{FIGURE}.{kind}": "figures" for kind in save.DRAWN},
    **{
        f"data/demo/{name}": "figures"
        for name in (f"{FIGURE}.csv", f"{FIGURE}.parquet", "cells.csv")
    },
    **{f"tables/demo/throughput.{kind}": "figures" for kind in ("md", "tex")},
    "sql/loss.sql": "figures",
    "claims.json": "figures",
    "claims.tex": "figures",
    "index.html": "page",
    "report.pdf": "page",
    "README.md": "page",
}
COPIED = {"claims.yaml": "figures", "CITATION.cff": "page", "workflow/Snakefile": "page"}


def edit_provenance(report, edit):
    record = read_json(report / "provenance.json")
    edit(record)
    (report / "provenance.json").write_text(canonical_json(record) + "\n")


def edit_releases(report, edit):
    """Edit what the record says of the report's packages, and write the README that follows."""
    edit_provenance(report, edit)
    record = read_json(report / "provenance.json")
    (report / "README.md").write_text(bundle.render_readme(record, cited=True))


def flip(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def flip_drawing(page):
    """Change one byte within the first drawing of a page."""
    data = bytearray(page.read_bytes())
    data[data.index(b"</svg>") - 20] ^= 1
    page.write_bytes(data)


@pytest.mark.parametrize(
    "renewed", [False, True], ids=["checksums as they were", "checksums renewed"]
)
def test_one_edited_byte_of_a_file_of_each_kind_is_named(results, renewed, request):
    report = results / "report"
    edited = DERIVED if renewed else DERIVED | COPIED
    for name in edited:
        flip(report / name, 0.99 if name == "claims.yaml" else 0.5)
    expected = [(link, f"{name}: ") for name, link in edited.items()]
    if renewed:
        run = next(iter(read_json(report / "provenance.json")["experiments"]["demo"]["runs"]))
        edit_provenance(
            report,
            lambda record: record["experiments"]["demo"]["runs"][run].update(machine="another"),
        )
        renew_sums(report)
        expected.append(("page", "provenance.json: "))
    else:
        request.getfixturevalue("quick")
    checked(report, expected, "more")


def test_claims_that_no_longer_run_are_named_though_checksums_fit(results):
    ledger = results / "report/claims.yaml"
    ledger.write_text(ledger.read_text().replace("FROM stalls", "FROM stills"))
    renew_sums(results / "report")
    checked(results / "report", [("figures", "claims and figures: ")], code=1)


def test_files_that_are_missing_added_or_only_listed_are_named(results, quick):
    report = results / "report"
    for name in ("figures/demo/more.svg", "figures/demo/forged.svg", "more.html"):
        (report / name).write_text("<svg/>")
    (report / "sql/loss.sql").unlink()
    (report / "sql/throughput.sql").unlink()
    with open(report / bundle.SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  figures/demo/forged.svg\n")
    renew_sums(report)
    with open(report / bundle.SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  sql/loss.sql\n")
    (report / "inside").mkdir()
    (report / "inside" / bundle.SUMS).write_text("")
    said = checked(
        report,
        [
            ("figures", "sql/loss.sql: missing"),
            ("figures", "sql/throughput.sql: missing"),
            ("figures", "figures/demo/more.svg: not in any"),
            ("page", "more.html: not in any"),
            ("figures", "figures/demo/forged.svg: the logs give no such"),
        ],
    )
    assert "note: inside/ is a report of its own, not checked here" in said


def test_an_edited_list_of_checksums_is_named(results, quick):
    """A digit, a name, a space, a line that is gone, and what is no text."""
    sums = results / "report" / bundle.SUMS
    whole = sums.read_bytes()
    edits = {b"  index": b"x  index", b"index.h": b"indey.h", b"  i": b" ,i", b"x.h": b"\xff.h"}
    edits[rb"\w+  README.md\n"] = b""
    for old, new in edits.items():
        sums.write_bytes(re.sub(old, new, whole, count=1))
        checked(results / "report", [("page", "SHA256SUMS: ")], "more")


@pytest.mark.parametrize("name", ["matplotlib", "pyarrow", "tokenscale", "code", "requests"])
def test_other_releases_leave_drawings_unchecked_and_data_compared(results, quick, name):
    def edit(record):
        if name == "code":
            record["code"]["tokenscale/report/page.py"] = "0.1"
        for packages in (
            (record,) if name == "tokenscale" else (record["packages"], record["installed"])
        ):
            packages |= {name: "0.1"} if name != "code" else {}

    report = results / "report"
    edit_releases(report, edit)
    found = {"figures": f"figures/demo/{FIGURE}.svg", "page": "index.html"}
    flip(report / found["figures"])
    flip_drawing(report / found["page"])
    renew_sums(report)
    if name == "requests":  # which draws nothing
        checked(report, [*found.items()])
        return
    said = checked(report, [], code=3)
    assert all(file in said for file in found.values()) and (
        name in said or name == "code" and "page.py" in said
    )
    flip(report / "data/demo/cells.csv")
    renew_sums(report)
    checked(report, [("figures", "data/demo/cells.csv: line")])


def edit_readme(report):
    """Turn its first statement around."""
    path = report / "README.md"
    path.write_text(path.read_text().replace("Everything here was", "Nothing here was"))
    renew_sums(report)


def reopen_run(report):
    """Take the seal out of a run's record; return the run."""
    run = next(iter(read_json(report / "provenance.json")["experiments"]["demo"]["runs"]))
    edit_provenance(report, lambda record: record["experiments"]["demo"]["runs"][run].pop("seal"))

    def change(found):
        path = found.root / "runs" / run / "run.json"
        write_json(path, logs.unsealed(path))

    change_logs(report, change)
    renew_sums(report)
    return run


def test_a_readme_is_compared_where_a_run_had_not_ended(results, quick):
    report = results / "report"
    reopen_run(report)
    edit_readme(report)
    checked(report, [("page", "README.md: line 3 has")])


def test_a_readme_is_compared_though_claims_no_longer_run(results):
    ledger = results / "report/claims.yaml"
    ledger.write_text(ledger.read_text().replace("FROM stalls", "FROM stills"))
    edit_readme(results / "report")
    checked(results / "report", [("figures", "claims and"), ("page", "README.md: line 3 has")])


def test_packages_that_the_record_lists_twice_are_compared(results, quick):
    """The README has the versions of one list, drawings are judged by both."""
    report = results / "report"
    edit_provenance(report, lambda record: record["packages"].update(matplotlib="0.1"))
    renew_sums(report)
    checked(report, [("page", "provenance.json: packages have matplotlib 0.1, installed is")])


def test_a_record_of_which_no_readme_can_be_made_is_named(results, quick):
    report = results / "report"
    edit_provenance(report, lambda record: record["logs"].update(runs="four"))
    renew_sums(report)
    checked(report, [("page", "provenance.json: the record of the report's origin does not")])


@pytest.mark.parametrize("name", ["matplotlib", "code"])
def test_the_text_of_a_page_is_compared_whatever_releases_are_installed(results, quick, name):
    def edit(record):
        if name == "code":
            record["code"]["tokenscale/report/page.py"] = "0.1"
        else:
            record["packages"][name] = record["installed"][name] = "0.1"

    report = results / "report"
    edit_releases(report, edit)
    page = report / "index.html"
    page.write_text(page.read_text().replace("Every number is computed", "No number is computed"))
    flip_drawing(page)
    renew_sums(report)
    checked(report, [("page", "index.html: line")])


def test_what_differs_where_a_run_had_not_ended_is_unchecked(results, quick):
    report = results / "report"
    run = reopen_run(report)
    flip(report / "data/demo/cells.csv")
    renew_sums(report)
    said = checked(report, [], code=3)
    assert f"not checked because runs had not ended: {run} (data/demo/cells.csv)" in said


def log_of(results):
    return min(results.glob("runs/*/attempt=00/rank=00000/steps.jsonl"))


def edit_log(results):
    path = log_of(results)
    path.write_text(path.read_text().replace('"step_s":', '"step_s":1', 1))
    return path.parents[2]


def record_of(results):
    return log_of(results).parents[2] / "run.json"


def replace_column(path, column, change):
    """The rows of a table with other values in a column."""
    rows = pq.read_table(path)
    place = rows.column_names.index(column)
    return rows.set_column(place, rows.schema.field(place), change(rows[column]))


def edit_table(results, name="steps", column="step_s", renew=True):
    path = results / f"tables/demo/{name}.parquet"
    rows = replace_column(path, column, lambda values: pc.divide(values, 2.0))
    with writer(path, name) as add:
        add(rows)
    if renew:
        renew_manifests(path.parent)


def edit_json(path, **values):
    write_json(path, read_json(path) | values)


def edit_description(results, **values):
    edit_json(results / "tables/demo/experiment.json", **values)
    renew_manifests(results / "tables/demo")


#: what is edited in results → how, and what the tables then differ in
SOURCES = {
    "a log": (edit_log, "validity.parquet"),
    "a log, and the record sealed again": (
        lambda results: seal(edit_log(results)),
        "has step_s",
    ),
    "a record": (lambda results: edit_json(record_of(results), parameters=7), "runs.parquet"),
    "a run's folder that is gone": (
        lambda results: shutil.rmtree(log_of(results).parents[2]),
        "runs.parquet",
    ),
    "a table": (lambda results: edit_table(results, renew=False), "steps.parquet: changed"),
    "a table and its manifest": (edit_table, "has step_s"),
    "a benchmark's table": (
        lambda results: edit_table(results, "benchmarks", "seconds"),
        "row 1 has seconds",
    ),
    "a benchmark's file": (lambda results: write_benchmark_again(results), "benchmarks.parquet"),
    "the experiment's description and the manifest": (
        lambda results: edit_description(results, question="another?"),
        "experiment.json",
    ),
    "the inputs that it names": (
        lambda results: edit_description(results, inputs={"table": "runs.json"}),
        "benchmarks.parquet",
    ),
    "the run table": (
        lambda results: edit_json(results / "runs.json", repeats=7),
        "the run table has changed",
    ),
    "the run table's seal": (
        lambda results: edit_json(results / "runs.json", seal="0" * 64),
        "run table has changed",
    ),
    "the settings of a run in the run table, sealed again": (
        lambda results: seal_table(results),
        "validity.parquet",
    ),
    "a run table that is cut short": (
        lambda results: os.truncate(results / "runs.json", 200),
        "runs.json: ",
    ),
    "a benchmark's file that is cut short": (
        lambda results: os.truncate(results / "bench.json", 9),
        "bench.json: ",
    ),
}


def seal_table(results):
    """Edit the first run of the run table, and seal it again."""
    table = logs.unsealed(results / "runs.json")
    table["runs"][0]["run"]["seed"] = 7
    write_json(results / "runs.json", table | {"seal": sha256_text(canonical_json(table))})


def write_benchmark_again(results):
    found = read_json(results / "bench.json")
    found["records"][0]["seconds"] *= 2
    write_json(results / "bench.json", found)


@pytest.mark.parametrize(("edit", "differs"), SOURCES.values(), ids=SOURCES)
def test_tables_are_compared_with_the_logs_of_results(results, edit, differs):
    edit(results)
    link = verification.check_tables(results / "tables/demo", results)
    assert differs in ", ".join(link.differs) and "tokenscale ingest" in link.next


#: what is edited in the packed logs → how, and the links that then differ, each with words of the
#: difference
PACKED = {
    "a log": (edit_log, {"logs": "steps.jsonl: changed", "tables": "demo"}),
    "a log, and the record sealed again": (
        SOURCES["a log, and the record sealed again"][0],
        {
            "logs": "another sealed record",
            "tables": "demo",
            "figures": "cells.csv",
            "page": "index.html",
        },
    ),
    "a record": (SOURCES["a record"][0], {"logs": "edited after it was sealed", "tables": "demo"}),
    "a benchmark": (write_benchmark_again, {"tables": "demo"}),
    "the run table": (SOURCES["the run table"][0], {"logs": "run table has changed"}),
    "a run that is gone": (SOURCES["a run's folder that is gone"][0], {"logs": "lacks runs/"}),
}


@pytest.mark.parametrize(("edit", "differs"), PACKED.values(), ids=PACKED)
def test_edited_logs_are_named_though_archive_and_checksums_fit(
    results, tmp_path, edit, differs, request
):
    if "page" not in differs:
        request.getfixturevalue("quick")
    archive = results / "report" / LOGS
    folder = tmp_path / "unpacked"
    content = json.loads(lzma.decompress(archive.read_bytes()))
    for name, text in content["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    edit(folder)
    content["files"] = {
        name: (folder / name).read_text() for name in content["files"] if (folder / name).is_file()
    }
    archive.write_bytes(lzma.compress(json.dumps(content).encode()))
    renew_sums(results / "report")
    chain = verify(results / "report")
    assert chain.code == 1
    for name, text in differs.items():
        assert text in ", ".join(chain.links[name].differs), chain


def test_results_name_forged_tables_and_drawings_and_reports_that_are_older(results, quick, capsys):
    edit_json(results / "figures/demo" / f"{FIGURE}.json", title="Another")
    assert main(["verify", str(results)]) == 1
    assert (
        f"figures differs at {results}/figures/demo/{FIGURE}.json: line " in capsys.readouterr().out
    )
    edit_table(results)
    assert main(["verify", str(results)]) == 1
    said = capsys.readouterr().out
    assert f"fault  {results}/tables/demo/steps.parquet: row 1 of " in said
    assert f"note   {results}/report: tables have changed since it was built: demo" in said
    assert "report: figures" not in said


#: why a report has no logs → how
WITHOUT = {
    "by the setting": (lambda results: None, "by a setting"),
    "they name a folder of this machine": (
        lambda results: edit_json(results / "bench.json", host=f"{Path.home()}/data/"),
        "folder of this machine",
    ),
    "they are not at hand": (lambda results: (results / "bench.json").unlink(), "is missing"),
}


@pytest.mark.parametrize(("change", "reason"), WITHOUT.values(), ids=WITHOUT)
def test_a_report_without_its_logs_is_built_and_says_why(
    results, change, reason, capsys, monkeypatch
):
    monkeypatch.chdir(results.parent)
    change(results)
    more = ["--no-logs"] if "setting" in reason else []
    report = Path("results/report")
    more += [
        "--ledger",
        "results/ledger.yaml",
        "--also",
        *(f"{report}/claims.{kind}" for kind in ("json", "tex")),
    ]
    assert main(["report", "bundle", "--experiments", "demo", "--output", str(report), *more]) == 0
    said = capsys.readouterr().out
    assert "logs.json.xz: left out: " in said and reason in said
    text = (report / "README.md").read_text()
    assert reason in text and str(Path.home()) not in text and not (report / LOGS).exists()
    assert main(["verify", str(report)]) == 3
    said = capsys.readouterr().out
    assert said.count(": not checked because ") == 4 and reason in said
    edit_readme(report)
    assert main(["verify", str(report)]) == 1
    assert "page: differs at README.md: line 3 has " in capsys.readouterr().out
    flip(report / "index.html")
    assert main(["verify", str(report)]) == 1


def open_record(results):
    write_json(record_of(results), logs.unsealed(record_of(results)))


def write_rows(path, rows, **options):
    pq.write_table(rows, path, **options)
    renew_manifests(path.parent)


def forget_inputs(results):
    """Values that were compared with a store stay what they were when the store has been
    deleted.
    """
    folder = results / "tables/demo"
    rows = replace_column(
        folder / "validity.parquet", "unchecked", lambda values: [[""] * len(values)]
    )
    write_verdict(folder, rows.to_pylist(), cautions=[])


def write_in_other_bytes(results):
    path = results / "tables/demo/steps.parquet"
    write_rows(path, pq.read_table(path), compression="none")


#: what is no fault of tables → how it comes about, and words of it
NO_FAULTS = {
    "a run that goes on": (open_record, "unchecked", "packed-"),
    "rows that another release wrote": (
        write_in_other_bytes,
        "notes",
        "equal values in other bytes",
    ),
    "inputs that were at hand then": (forget_inputs, "notes", "inputs of runs"),
    "logs that are not at hand": (
        lambda results: shutil.rmtree(results / "runs"),
        "unchecked",
        "not at hand",
    ),
}


@pytest.mark.parametrize(("change", "kind", "words"), NO_FAULTS.values(), ids=NO_FAULTS)
def test_what_is_no_fault_of_tables_is_stated(results, quick, capsys, change, kind, words):
    change(results)
    link = verification.check_tables(results / "tables/demo", results)
    assert not link.differs and words in ", ".join(getattr(link, kind))
    if "hand" in words:
        assert main(["verify", str(results)]) == 3
        assert "tables of demo not proven" in capsys.readouterr().out


def environment(results, capsys, *arguments) -> str:
    """What `tokenscale environment` prints."""
    assert main(["environment", str(results), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_environment_of_a_report_is_requirements_that_pip_takes(made, tmp_path, capsys):
    """Each package that is installed, by the version that registries have, and nothing of this
    project.
    """
    text = environment(made / "report", capsys)
    stated = [
        Requirement(line.partition("  #")[0])
        for line in text.splitlines()
        if not line.startswith("#")
    ]
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    del installed["tokenscale"]
    expected = {name: f"=={version.partition('+')[0]}" for name, version in installed.items()}
    assert {r.name: str(r.specifier) for r in stated} == expected
    assert environment(made / "report", capsys, "--output", tmp_path / "lock.txt") == ""
    assert (tmp_path / "lock.txt").read_text() == text
    assert text.startswith(
        f"# The environment of {made / 'report'}: Python {platform.python_version()}, tokenscale "
    )
    run = min((made / "runs").glob("*/run.json"))
    text = environment(run.parent, capsys)
    assert (
        f"torch=={read_json(run)['versions']['torch']}" in text
        and "has only the main packages" in text
    )
    assert (
        main(["environment", str(tmp_path)]) == 2
        and "there is no record of an env" in capsys.readouterr().err
    )
    (tmp_path / "provenance.json").write_text("{}")
    assert (
        main(["environment", str(tmp_path)]) == 2 and "expected content" in capsys.readouterr().err
    )


def test_runs_that_other_packages_trained_are_named_with_them(results, quick, capsys):
    """In the requirements as comments, and by `verify` as a note: such a report is still what its
    data draw.
    """
    path = results / "report/provenance.json"
    record = read_json(path)
    here = record["installed"]["numpy"]
    one = min(record["experiments"]["demo"]["runs"])

    def edit(record):
        record["experiments"]["demo"]["runs"][one]["packages"]["numpy"] = "1.0"
        record["installed"]["duckdb"] = record["packages"]["duckdb"] = "0.1"

    edit_releases(results / "report", edit)
    record = read_json(path)
    renew_sums(results / "report")
    text = environment(results / "report", capsys)
    assert "duckdb==0.1\n" in text and re.search(
        rf"^# trained with numpy 1\.0\b.*: {one}$", text, re.MULTILINE
    )
    said = checked(results / "report", [])
    assert "the report was built with other packages: duckdb 0.1 then, " in said
    assert f"numpy 1.0 then, {here} now" in said and "runs were trained with other" in said
    path.write_text(json.dumps(record | {"experiments": {"demo": {}}}))
    checked(results / "report", [("page", "does not have the expected content")], "more")


def test_everything_is_rebuilt_with_equal_bytes(made, tmp_path):
    """In a process of its own, in another folder, with other threads and cores and another order of
    sets.
    """
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    shutil.copytree(made, tmp_path / "results", ignore=shutil.ignore_patterns("figures", "report"))
    script = (
        "import os; from pathlib import Path; from tests.experiments.test_report_folder import "
        "report;"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1]); report(Path('results'))"
    )
    more = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS"), "2")
    more |= {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ | more, check=True)
    found = hashes(tmp_path / "results")
    before = hashes(made)
    of_commit = {f"report/{name}" for name in ("README.md", "provenance.json", bundle.SUMS)}
    assert len(found) > 60 and of_commit < found.keys() == before.keys()
    assert {name for name in found if found[name] != before[name]} <= of_commit


def test_a_signature_is_checked_against_the_signers_that_are_trusted(
    results, quick, tmp_path, capsys
):
    report = results / "report"
    signers = tmp_path / "signers"
    key = tmp_path / "key"

    def sign(key):
        (report / "SHA256SUMS.sig").unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        command = [
            "ssh-keygen",
            "-q",
            "-Y",
            "sign",
            "-n",
            "tokenscale",
            "-f",
            key,
            report / "SHA256SUMS",
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    sign(key)
    signers.write_text(f'me@host namespaces="tokenscale" {key.with_suffix(".pub").read_text()}')
    assert main(["verify", str(report), "--signers", str(signers)]) == 0
    assert "signed by me@host" in capsys.readouterr().out
    assert "--signers FILE tells by whom" in checked(report, [])
    (report / "CITATION.cff").write_text("edited")
    renew_sums(report)
    checked(report, [("page", "SHA256SUMS: it is not what me@host signed")], signers=signers)
    (report / "SHA256SUMS.sig").rename(tmp_path / "taken.sig")
    checked(report, [("page", "not signed")], signers=signers)
    sign(tmp_path / "other")
    checked(report, [("page", "signed by nobody whom")], signers=signers)


def test_tables_as_markdown_and_latex_escape_what_they_hold():
    table = Table(
        [("a|b", False), ("x_1 & 50 %", True)],
        [["<b>", "[1]"], ["\\", "1\u202f000 × 2"]],
        "50 % of $x$",
    )
    assert markdown(table).splitlines() == [
        r"| a\|b | x_1 \& 50 % |",
        "| :-- | --: |",
        r"| \<b> | \[1\] |",
        "| \\\\ | 1\u202f000 × 2 |",
        "",
        "50 % of $x$",
    ]
    lines = latex(table, "tab:a b").splitlines()
    assert r"a\textbar{}b & x\_1 \& 50 \% \\ \midrule" in lines
    assert r"\textless{}b\textgreater{} & {[}1] \\" in lines
    assert r"\textbackslash{} & 1\,000 $\times$ 2 \\" in lines
    assert r"\caption{50 \% of \$x\$}" in lines and r"\label{tab:a-b}" in lines


#: verify a folder, and import what compares two, where only the named packages and their
#: requirements can be imported
WITH_FEW = """
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
few, names = set(), sys.argv[2:]
while names:
    few.add(name := canonicalize_name(names.pop()))
    needed = [Requirement(text) for text in metadata.requires(name) or ()]
    names += [r.name for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
of = {module: {canonicalize_name(n) for n in names} for module, names in metadata.packages_distributions().items()}
class Finder:
    def find_spec(self, module, *_):
        if not of.get(module.partition(".")[0], few | {"tokenscale"}) & (few | {"tokenscale"}):
            raise ModuleNotFoundError(module)
sys.meta_path.insert(0, Finder())
from tokenscale.cli import diff, main
sys.exit(main.main(["verify", sys.argv[1]]))
"""


def test_the_packages_that_the_readme_installs_are_enough_to_verify(made):
    lines = re.findall(
        r"^    pip install (\w.*)", (made / "report/README.md").read_text(), re.MULTILINE
    )
    (wanted,) = ([Requirement(text) for text in line.split()] for line in lines)
    assert all(str(r.specifier) == f"=={importlib.metadata.version(r.name)}" for r in wanted)
    assert not {"torch", "transformers", "snakemake"} & {r.name for r in wanted}
    command = [
        sys.executable,
        "-c",
        WITH_FEW,
        made / "report/data/demo/cells.csv",
        *(r.name for r in wanted),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and ended.stdout.count(": agrees\n") == 4, (
        ended.stdout + ended.stderr
    )


def test_a_forged_verdict_is_named_though_the_whole_report_was_built_with_it(results):
    report = results / "report"
    claims = report / "claims.json"
    assert '"verdict": "inconclusive"' in claims.read_text()
    claims.write_text(
        claims.read_text().replace('"verdict": "inconclusive"', '"verdict": "supported"')
    )
    where = ([summary.experiment("demo", results / "tables")], results / "figures")
    page.write(*where, report / "index.html", claims=claims)
    pdf.write(*where, report / "report.pdf", claims=claims)
    renew_sums(report)
    forged = '"verdict": "supported"'
    checked(report, [("figures", forged), ("page", "index.html"), ("page", "report.pdf")])


# -- the whole report at once: the bytes of the single commands, and what is refused

NAMES = ["demo", "second"]


def build_by_single_commands(tables, output, ledger):
    """As the rules call them."""
    report = output / "report"
    of = ["--experiments", *NAMES]
    copied = [word for name, path in FILES.items() for word in (f"--{name}", str(path))]
    places = ["--figures", str(output / "figures")]
    judged = [report / "claims.json", report / "claims.tex"]
    claims = ["--claims", str(judged[0])]
    also = [*(report / f"{name}.html" for name in NAMES), *judged]
    assert (
        main(["claims", "--ledger", ledger, "--tables", str(tables), "--output", str(report), *of])
        == 0
    )
    for name, path in zip(NAMES, also, strict=False):
        target = str(output / "figures" / name / FIGURE)
        assert (
            main(["report", "figure", FIGURE, "--tables", str(tables / name), "--output", target])
            == 0
        )
        description = str(output / "figures" / name / summary.FILE)
        of_table = ["--tables", str(tables / name), "--output", description]
        assert main(["report", "description", *of_table]) == 0
        assert (
            main(
                [
                    "report",
                    "page",
                    "--of-several",
                    "--experiments",
                    name,
                    *places,
                    "--output",
                    str(path),
                ]
            )
            == 0
        )
    for part, file in (("page", "index.html"), ("pdf", "report.pdf")):
        assert main(["report", part, *places, *claims, "--output", str(report / file), *of]) == 0
    assert (
        main(["report", "page", "--of-several", *places, "--output", str(output / "x"), *of]) == 2
    )
    places += ["--tables", str(tables)]
    places += ["--output", str(report), "--ledger", ledger, *copied, "--also", *map(str, also)]
    assert main(["report", "bundle", *places, *of]) == 0


@pytest.mark.long
def test_the_report_is_what_the_single_commands_make_and_no_figure_is_drawn_twice(
    made, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tables = tmp_path / "tables"
    one = tmp_path / "one"
    shutil.copytree(made / "tables/demo", tables / "demo")
    options = {
        "world_sizes": (1,),
        "repeats": 2,
        "approaches": ("packed", "token-list"),
        "figures": [FIGURE],
    }
    logs.demo(tmp_path / "logs", to=tables / "second", **options)
    for names, said in (
        (["demo", "demo"], "named twice"),
        (["demo", "nobody"], "no tables in this folder"),
    ):
        with pytest.raises(UserError, match=said):
            build.write(names, tables, one / "figures", one / "report")
        assert not one.exists()
    drawn = []
    draw = save.draw
    monkeypatch.setattr(
        save,
        "draw",
        lambda made, *rest, **more: drawn.append(made.name) or draw(made, *rest, **more),
    )
    ledger = shutil.copy(ROOT / "config/claims.yaml", tmp_path / "claims.yaml")
    written = build.write(NAMES, tables, one / "figures", one / "report", ledger=ledger, **FILES)
    assert drawn == 4 * [FIGURE], "of each experiment once wide and once for a phone"
    assert {one / "report" / name for name in ("index.html", "report.pdf", "SHA256SUMS")} <= {
        *written
    }
    build_by_single_commands(tables, tmp_path / "single", str(ledger))
    found = hashes(one)
    assert found == hashes(tmp_path / "single")
    assert {
        "figures/second/data_stall_share.pdf",
        "report/claims.tex",
        "report/second.html",
    } <= set(found)


def test_one_experiment_is_shown_on_the_first_page(made, tmp_path, capsys):
    for name in ("figures", "report"):
        (tmp_path / name).symlink_to(made / name)
    places = [
        "--figures",
        str(tmp_path / "figures"),
        "--claims",
        str(tmp_path / "report/claims.json"),
        "--output",
        str(tmp_path / "single/index.html"),
    ]
    assert main(["report", "page", *places, "--experiments", "demo"]) == 0
    path, answers, *cautions = capsys.readouterr().out.splitlines()
    assert path == places[-1] and answers.startswith("answers ") and 0 < len(cautions) <= 7
    text = Path(path).read_text().replace("../report/claims.json", "claims.json")
    assert text == (made / "report/index.html").read_text()
