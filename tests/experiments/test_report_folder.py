"""The report's folder: what it holds, that it can be verified, and that equal tables give equal bytes."""

import importlib.metadata
import json
import os
import platform
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
from tests.once import once
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.tables import write_manifest, writer
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from tokenscale.base.manifests import read_sums
from tokenscale.cli.main import main
from tokenscale.report import build, bundle, page, pdf, save, verification
from tokenscale.report.table import Table, latex, markdown
from tokenscale.report.verification import verify
from tokenscale.train.record import log_hashes

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

ROOT = Path(__file__).parents[2]
FIGURE = "data_stall_share"


def seal_logs(run):
    """Seal a run's record with the hashes of its logs, as a training does at its end."""
    record = read_json(run / "run.json")
    logs.provenance.seal_record(run, record, record["outcome"] | {"logs": log_hashes(run)})
    write_json(run / "done.json", {"seal": read_json(run / "run.json")["seal"]})


def tables(folder):
    """One small experiment's tables below `folder`."""
    table = logs.write_demo(folder, world_sizes=(1,), repeats=2, approaches=("padded", "packed"), figures=[FIGURE])
    for path in folder.glob("runs/*/run.json"):
        seal_logs(path.parent)
    ingest(table, folder / "runs", folder / "tables" / "demo", [folder / "bench.json"])
    return folder / "tables"


def report(results):
    """Figures and report below `results`, from `results/tables`; the report's folder."""
    save.save(FIGURE, results / "tables" / "demo", results / "figures" / "demo" / FIGURE)
    folder = results / "report"
    page.write(["demo"], results / "tables", results / "figures", folder / "index.html")
    pdf.write(["demo"], results / "tables", folder / "report.pdf")
    files = {"workflow": ROOT / "workflow/Snakefile", "citation": ROOT / "CITATION.cff"}
    bundle.write(["demo"], results / "tables", results / "figures", folder, **files)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`results` with tables and a report. Nobody may change it."""

    def build(folder):
        tables(folder)
        report(folder)

    return once(tmp_path_factory, "report-folder", build)


@pytest.fixture
def results(made, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "results"))


def drawing(results, kind="svg"):
    return results / "report" / "figures" / "demo" / f"{FIGURE}.{kind}"


def hashes(folder):
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def test_the_folder_holds_what_the_report_is_made_of(made):
    found = hashes(made / "report")
    for name in (
        "index.html", "report.pdf", "README.md", "CITATION.cff", "provenance.json", "ro-crate-metadata.json",
        *(f"figures/demo/{FIGURE}.{kind}" for kind in save.DRAWN),
        *(f"data/demo/{name}.{kind}" for name in (FIGURE, "cells") for kind in ("csv", "parquet")),
        "sql/throughput.sql", "tables/demo/throughput.md", "tables/demo/throughput.tex", "workflow/Snakefile",
    ):  # fmt: skip
        assert name in found
    del found[bundle.SUMS]
    assert read_sums(made / "report") == found


def test_what_no_longer_belongs_to_the_report_is_removed(results):
    stale = results / "report" / "figures" / "gone" / "old.svg"
    stale.parent.mkdir()
    stale.write_text("old")
    (results / "report" / "mine.html").write_text("not of the bundle")
    before = drawing(results).stat().st_ino
    report(results)
    assert not stale.parent.exists()
    assert (results / "report" / "mine.html").is_file()
    assert drawing(results).stat().st_ino == before, "an equal file is not written again"


def test_a_missing_figure_is_named(results):
    (results / "figures" / "demo" / f"{FIGURE}.parquet").unlink()
    with pytest.raises(UserError, match=rf"{FIGURE}\.parquet[\s\S]*snakemake .*{FIGURE}\.svg"):
        bundle.write(["demo"], results / "tables", results / "figures", results / "report")


def test_provenance_leads_from_a_figure_to_the_sealed_records(made):
    record = read_json(made / "report" / "provenance.json")
    facts = record["experiments"]["demo"]["runs"]
    records = [read_json(path) for path in (made / "runs").glob("*/run.json")]
    assert {run: of["seal"] for run, of in facts.items()} == {r["run_id"]: r["seal"] for r in records}
    assert {of["commit"] for of in facts.values()} == {"0123456789abcdef0123456789abcdef01234567"}
    assert record["packages"].keys() >= {"matplotlib", "duckdb", "python"}
    assert record["experiments"]["demo"]["tables"] == sha256_file(made / "tables/demo/manifest.json")


# --- verification ---------------------------------------------------------------------------------------------------


def checked(results, expected, signers=None, rebuilt=False):
    """Check a report against (link, text) of each expected difference; return the notes and next steps."""
    with pytest.MonkeyPatch.context() as patch:
        if not rebuilt:
            patch.setattr(verification, "_check_rebuilt", lambda *_: None)
        chain = verify(results / "report", results, signers=signers)
    found = [(name, text) for name, link in chain.links.items() for text in link.differs]
    for name, text in expected:
        assert any(link == name and text in said for link, said in found), (name, text, found)
    assert {name for name, _ in found} == {name for name, _ in expected}, found
    assert chain.code == (1 if expected else 0)
    return [*chain.notes, *str(chain).partition("\n  next: ")[2].splitlines()]


def renew_sums(results):
    """Renew the checksums of all files that the report lists, as whoever edits one may do."""
    sums = results / "report" / bundle.SUMS
    names = [line[66:] for line in sums.read_text().splitlines() if (results / "report" / line[66:]).is_file()]
    sums.write_text("".join(f"{sha256_file(results / 'report' / name)}  {name}\n" for name in names))


#: file of the report → the link of the chain that it belongs to
EDITED = {
    **{f"figures/demo/{FIGURE}.{kind}": "figures" for kind in save.DRAWN},
    **{f"data/demo/{name}": "figures" for name in (f"{FIGURE}.csv", f"{FIGURE}.parquet", "cells.csv")},
    **{"sql/loss.sql": "figures", "tables/demo/throughput.md": "figures"},
    **{"index.html": "page", "report.pdf": "page", "README.md": "page"},
}


@pytest.mark.parametrize("renewed", [False, True], ids=["checksums as they were", "checksums renewed"])
def test_every_edited_file_of_a_report_is_named(results, renewed, capsys):
    for name in EDITED:
        path = results / "report" / name
        path.write_bytes(path.read_bytes() + b"\n")
    if renewed:
        renew_sums(results)
    checked(results, [(link, name) for name, link in EDITED.items()], rebuilt=True)
    assert main(["verify", str(drawing(results)), "--results", str(results)]) == 1
    said = capsys.readouterr().out
    assert "logs: agrees" in said and "tables: agrees" in said and "page: differs at " in said


def test_files_that_are_missing_added_or_only_listed_are_named(results):
    folder = results / "report"
    (folder / "figures/demo/more.svg").write_text("<svg/>")
    (folder / "figures/demo/forged.svg").write_text("<svg/>")
    (folder / "sql/loss.sql").unlink()
    record = read_json(folder / "provenance.json")
    next(iter(record["experiments"]["demo"]["runs"].values()))["machine"] = "another"
    (folder / "provenance.json").write_text(json.dumps(record))
    with open(folder / bundle.SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  figures/demo/forged.svg\n")
    renew_sums(results)
    with open(folder / bundle.SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  sql/loss.sql\n")
    expected = [("figures", "sql/loss.sql: missing"), ("figures", "figures/demo/more.svg: not in any"),
                ("figures", "figures/demo/forged.svg: the tables give no such"), 
                ("page", "provenance.json: its runs")]  # fmt: skip
    checked(results, expected, rebuilt=True)


def log_of(results, run=0):
    return sorted(results.glob("runs/*/attempt=00/rank=00000/steps.jsonl"))[run]


def edit_log(results):
    path = log_of(results)
    path.write_text(path.read_text().replace('"step_s":', '"step_s":1', 1))
    return path.parents[2]


def edit_record(results):
    path = log_of(results).parents[2] / "run.json"
    path.write_text(json.dumps(read_json(path) | {"parameters": 7}))


def edit_table(results, name="steps", column="step_s", renew=True):
    path = results / f"tables/demo/{name}.parquet"
    rows = pq.read_table(path)
    place = rows.column_names.index(column)
    rows = rows.set_column(place, rows.schema.field(place), pc.divide(rows[column], 2.0))
    with writer(path, name) as add:
        add(rows)
    if renew:
        write_manifest(path.parent)


def edit_json(path, renew=None, **values):
    write_json(path, read_json(path) | values)
    if renew:
        write_manifest(path.parent)


#: what is edited → how, and the links that then differ, each with words of the difference
SOURCES = {
    "a log": (edit_log, {"logs": "steps.jsonl: changed", "tables": "runs.parquet"}),
    "a log, and the record sealed again": (
        lambda results: seal_logs(edit_log(results)), {"logs": "another sealed record", "tables": "has step_s"}),
    "a record": (edit_record, {"logs": "edited after it was sealed", "tables": "runs.parquet"}),
    "a run's folder that is gone": (
        lambda results: shutil.rmtree(log_of(results).parents[2]),
        {"logs": "the run is gone", "tables": "runs.parquet"}),
    "a table": (lambda results: edit_table(results, renew=False), {"tables": "steps.parquet: changed"}),
    "a table and its manifest": (edit_table, {"tables": "has step_s"}),
    "losses and their manifest": (lambda results: edit_table(results, column="loss_sum"), {"tables": "has loss_sum"}),
    "a benchmark's table and its manifest": (
        lambda results: edit_table(results, "benchmarks", "seconds"),
        {"tables": "benchmarks.parquet: row 1 has seconds"}),
    "a benchmark's file": (lambda results: write_benchmark_again(results), {"tables": "benchmarks.parquet"}),
    "the description of the experiment and the manifest": (
        lambda results: edit_json(results / "tables/demo/experiment.json", renew=True, question="another?"),
        {"tables": "experiment.json"}),
    "the inputs that it names": (
        lambda results: edit_json(results / "tables/demo/experiment.json", renew=True, inputs={"table": "runs.json"}),
        {"tables": "benchmarks.parquet"}),
    "the run table": (
        lambda results: edit_json(results / "runs.json", runs=read_json(results / "runs.json")["runs"][:-1]),
        {"tables": "runs.json: the run table has changed"}),
    "the run table's seal": (
        lambda results: edit_json(results / "runs.json", seal="0" * 64),
        {"tables": "runs.json: the run table has changed"}),
    "the settings of a run in the run table, sealed again": (
        lambda results: seal_table(results, lambda entry: entry["run"].update(seed=7)), {"tables": "runs.parquet"}),
    "the repeat of a run in the run table, sealed again": (
        lambda results: seal_table(results, lambda entry: entry.update(repeat=9)), {"tables": "runs.parquet"}),
    "a run table that is cut short": (
        lambda results: os.truncate(results / "runs.json", 200), {"tables": "runs.json: "}),
    "a benchmark's file that is cut short": (
        lambda results: os.truncate(results / "bench.json", 9), {"tables": "bench.json: "}),
}  # fmt: skip


def seal_table(results, edit):
    """Edit the first run of the run table, and seal it again."""
    table = read_json(results / "runs.json")
    edit(table["runs"][0])
    body = {key: value for key, value in table.items() if key != "seal"}
    write_json(results / "runs.json", body | {"seal": sha256_text(canonical_json(body))})


def write_benchmark_again(results):
    found = read_json(results / "bench.json")
    found["records"][0]["seconds"] *= 2
    write_json(results / "bench.json", found)


@pytest.mark.parametrize(("edit", "differs"), SOURCES.values(), ids=SOURCES)
def test_what_follows_from_the_logs_is_compared_with_them(results, edit, differs):
    edit(results)
    said = "\n".join(checked(results, [*differs.items()]))
    assert ("python -m tokenscale ingest" in said) == ("tables" in differs)
    assert ("restore the folders of runs" in said) == ("logs" in differs)


def test_a_forged_table_is_a_fault_of_the_results(results, capsys):
    edit_json(results / "figures/demo" / f"{FIGURE}.json", title="Another")
    assert main(["verify", str(results)]) == 1
    assert f"figures differs at {results}/figures/demo/{FIGURE}.json line " in capsys.readouterr().out
    edit_table(results)
    assert main(["verify", str(results)]) == 1
    said = capsys.readouterr().out
    assert f"fault  {results}/tables/demo/steps.parquet: row 1 of " in said
    assert "report: figures differs at data/" in said


def test_what_is_not_at_hand_is_stated_and_has_its_exit_code(results, tmp_path, capsys):
    shutil.rmtree(results / "runs")
    for path in (results, results / "report"):
        assert main(["verify", str(path), "--results", str(results)]) == 3
        said = capsys.readouterr().out
        assert "logs are not at hand" in said and "tables of demo not proven" in said
    shutil.move(results / "report", tmp_path / "mail")
    assert main(["verify", str(tmp_path / "mail"), "--results", str(tmp_path / "empty")]) == 3
    said = capsys.readouterr().out
    assert said.count(": not checked because ") == 4 and "there are no tables" in said


def test_a_run_that_goes_on_is_no_fault_of_older_tables(results):
    path = log_of(results).parents[2] / "run.json"
    record = read_json(path)
    path.write_text(json.dumps({key: value for key, value in record.items() if key != "seal"}))
    link = verification.check_tables(results / "tables/demo", results)
    assert not link.differs and record["run_id"] in link.unchecked[0]


def test_rows_that_another_release_wrote_are_a_note(results):
    path = results / "tables/demo/steps.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")
    write_manifest(path.parent)
    assert any("equal values in other bytes" in note for note in checked(results, []))


def test_inputs_that_were_at_hand_then_and_are_not_now_are_a_note(results):
    """Values that were compared with a store stay what they were when the store has been deleted."""
    path = results / "tables/demo/runs.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("unchecked")
    pq.write_table(table.set_column(place, table.schema.field(place), [[""] * len(table)]), path)
    write_manifest(path.parent)
    link = verification.check_tables(path.parent, results)
    assert not link.differs and "inputs of runs" in link.notes[0]


def test_a_figure_that_was_lifted_out_is_found_by_its_hash(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verification, "_check_rebuilt", lambda *_: None)
    alone = shutil.copy(drawing(results, "png"), tmp_path / "alone.png")
    assert main(["verify", str(alone), "--results", str(results)]) == 0
    assert f"{alone} is figures/demo/{FIGURE}.png of this report" in capsys.readouterr().out
    alone.write_bytes(alone.read_bytes() + b"x")
    assert main(["verify", str(alone), "--results", str(results)]) == 1
    assert f"{alone}: no file of {results / 'report'} has its hash" in capsys.readouterr().out
    for path, said in (
        (tmp_path / "none.svg", "no such file"), (alone, "no report at hand"), (tmp_path, "no list of checksums"),
    ):  # fmt: skip
        assert main(["verify", str(path), "--results", str(tmp_path / "empty")]) == 2
        assert said in capsys.readouterr().err


def test_changed_code_is_named_with_the_files(results):
    path = results / "report/provenance.json"
    record = read_json(path)
    record["code"]["tokenscale/analysis/sql/stalls.sql"] = "0" * 64
    path.write_text(json.dumps(record))
    renew_sums(results)
    notes = checked(results, [], rebuilt=True)
    assert any("source files have changed" in note and "sql/stalls.sql" in note for note in notes)


def environment(results, capsys, *arguments) -> str:
    """What `tokenscale environment` prints."""
    assert main(["environment", str(results), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_environment_of_a_report_is_requirements_that_pip_takes(made, tmp_path, capsys):
    """Each package that is installed, by the version that registries have, and nothing of this project."""
    text = environment(made / "report", capsys)
    stated = [Requirement(line.partition("  #")[0]) for line in text.splitlines() if not line.startswith("#")]
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    del installed["tokenscale"]
    assert {r.name: str(r.specifier) for r in stated} == {
        name: f"=={version.partition('+')[0]}" for name, version in installed.items()
    }
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "-q", "-r"]
    assert environment(made / "report", capsys, "--output", tmp_path / "lock.txt") == ""
    assert (tmp_path / "lock.txt").read_text() == text
    done = subprocess.run([*command, tmp_path / "lock.txt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert text.startswith(f"# The environment of {made / 'report'}: Python {platform.python_version()}, tokenscale ")


def test_runs_that_other_packages_trained_are_named_with_them(results, capsys):
    """In the requirements as comments, and by `verify` as a note: such a report is still what its data draw."""
    path = results / "report/provenance.json"
    record = read_json(path)
    here = record["installed"]["numpy"]
    one = min(record["experiments"]["demo"]["runs"])
    record["experiments"]["demo"]["runs"][one]["packages"]["numpy"] = "1.0"
    record["installed"]["duckdb"] = "0.1"
    path.write_text(json.dumps(record))
    renew_sums(results)
    text = environment(results / "report", capsys)
    assert "duckdb==0.1\n" in text and f"# trained with numpy 1.0, torch 2.13.0: {one}\n" in text
    built, trained = checked(results, [])
    assert "the report was built with other packages: duckdb 0.1 then, " in built, "no fault"
    assert f"numpy 1.0 then, {here} now" in trained and "runs were trained with other" in trained
    path.write_text(json.dumps(record | {"experiments": {"demo": {}}}))
    with pytest.raises(UserError, match="does not have the expected content"):
        checked(results, [])


def test_a_record_from_before_names_what_it_has_and_no_record_is_one_message(results, tmp_path, capsys):
    path = results / "report/provenance.json"
    record = read_json(path)
    del record["installed"]
    path.write_text(json.dumps(record))
    text = environment(results / "report", capsys)
    assert "has only the main packages" in text and f"duckdb=={record['packages']['duckdb']}" in text
    run = min((results / "runs").glob("*/run.json"))
    assert f"torch=={read_json(run)['versions']['torch']}" in environment(run.parent, capsys)
    assert main(["environment", str(tmp_path)]) == 2 and "there is no record of an env" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["environment", str(results / "report")]) == 2 and "expected content" in capsys.readouterr().err


def test_the_crate_describes_every_file_and_claims_no_more_than_it_holds(made, results):
    graph = read_json(made / "report" / "ro-crate-metadata.json")["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)
    for name, sha256 in read_sums(made / "report").items():
        if name != "ro-crate-metadata.json":
            assert entities[name]["sha256"] == sha256
            assert entities[name]["contentSize"] == str((made / "report" / name).stat().st_size)
    described = {name for name, entity in entities.items() if "File" in entity["@type"]}
    root, head = entities["./"], entities["ro-crate-metadata.json"]
    assert described | {"ro-crate-metadata.json"} == read_sums(made / "report").keys()
    assert {part["@id"] for part in root["hasPart"]} == described
    assert head["about"] == {"@id": "./"} and {"@id": "https://w3id.org/ro/crate/1.2"} in head["conformsTo"]
    assert root["@type"] == "Dataset" and root["name"] and root["description"] and root["datePublished"]
    context = read_json(made / "report" / "ro-crate-metadata.json")["@context"]
    assert context[0] == "https://w3id.org/ro/crate/1.2/context"
    assert root["mainEntity"] == entities["#report"]["instrument"] == {"@id": "workflow/Snakefile"}
    assert "ComputationalWorkflow" in entities["workflow/Snakefile"]["@type"]
    assert any("wfrun/workflow" in profile["@id"] for profile in root["conformsTo"])
    references = [v["@id"] for e in graph for k in e for v in (e[k] if isinstance(e[k], list) else [e[k]])
                  if isinstance(v, dict) and not v["@id"].startswith("http")]  # fmt: skip
    assert set(references) <= entities.keys()
    assert not {"author", "license"} & root.keys(), "nobody has told them"
    bundle.write(["demo"], results / "tables", results / "figures", results / "report")
    without = read_json(results / "report" / "ro-crate-metadata.json")["@graph"]
    (root,) = [entity for entity in without if entity["@id"] == "./"]
    assert "mainEntity" not in root and not any("wfrun/workflow" in p["@id"] for p in root["conformsTo"])


def test_everything_is_rebuilt_with_equal_bytes_on_one_thread_and_on_two(made, tmp_path):
    """In processes of their own, in other folders, with other threads and cores and another order of sets."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    found = []
    for threads in (1, 2):
        folder = tmp_path / str(threads) / "results"
        shutil.copytree(made / "tables", folder / "tables")
        script = (
            "import os; from pathlib import Path; from tests.experiments.test_report_folder import report;"
            f"os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{threads}]); report(Path('results'))"
        )
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS"), str(threads))
        environment = os.environ | counts | {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}"}
        environment["PYTHONHASHSEED"] = str(threads)
        subprocess.run([sys.executable, "-c", script], cwd=folder.parent, env=environment, check=True)
        found.append(hashes(folder))
    assert found[0] == found[1] and len(found[0]) > 60


@pytest.fixture
def signed(results, tmp_path):
    """A signed report, and the file of its signers."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "signers").write_text(f'me@host namespaces="tokenscale" {key.with_suffix(".pub").read_text()}')
    sign(results, key)
    return results, tmp_path / "signers"


def sign(results, key):
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-n", "tokenscale", "-f", key, results / "report/SHA256SUMS"],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def test_a_signature_is_checked_against_the_signers_that_are_trusted(signed, tmp_path, capsys):
    results, signers = signed
    arguments = ["verify", str(results / "report"), "--results", str(results), "--signers", str(signers)]
    assert main(arguments) == 0 and "signed by me@host" in capsys.readouterr().out
    assert "--signers FILE tells by whom" in checked(results, [])[-1]
    (results / "report/README.md").write_text("edited")
    renew_sums(results)
    checked(results, [("page", "SHA256SUMS: it is not what me@host signed")], signers)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    (results / "report/SHA256SUMS.sig").unlink()
    checked(results, [("page", "not signed")], signers)
    sign(results, tmp_path / "other")
    checked(results, [("page", "signed by nobody whom")], signers)


def test_tables_as_markdown_and_latex_escape_what_they_hold():
    table = Table([("a|b", False), ("x_1 & 50 %", True)], [["<b>", "[1]"], ["\\", "1\u202f000 × 2"]], "50 % of $x$")
    assert markdown(table).splitlines() == [
        r"| a\|b | x_1 \& 50 % |", "| :-- | --: |", r"| \<b> | \[1\] |", "| \\\\ | 1\u202f000 × 2 |", "", "50 % of $x$",
    ]  # fmt: skip
    lines = latex(table, "tab:a b").splitlines()
    assert r"a\textbar{}b & x\_1 \& 50 \% \\ \midrule" in lines
    assert r"\textless{}b\textgreater{} & {[}1] \\" in lines
    assert r"\textbackslash{} & 1\,000 $\times$ 2 \\" in lines
    assert r"\caption{50 \% of \$x\$}" in lines and r"\label{tab:a-b}" in lines


def test_verifying_and_comparing_need_no_trainer():
    script = "import sys; from tokenscale.report import bundle, difference, verification; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "scipy", "pydantic", "snakemake"} & set(loaded)


def test_cells_say_what_each_run_measured(made):
    rows = pq.read_table(made / "report/data/demo/cells.parquet").to_pandas().set_index("run_id")
    assert len(rows) == 4 and rows["seal"].notna().all()
    for run in (made / "runs").iterdir():
        steps = [json.loads(line) for line in (run / "attempt=00/rank=00000/steps.jsonl").read_text().splitlines()][3:]
        rate = sum(s["useful_tokens"] for s in steps) / sum(s["step_s"] for s in steps)
        assert rows.loc[run.name, "useful_tokens_per_s"] == pytest.approx(rate)


LEDGER = """
documents: {study: {title: A study}}
claims:
  waits:
    document: study
    claim: runs wait for data
    sentence: "Waiting takes {number}."
    sql: SELECT run_id, data_stall_share AS value FROM stalls
    experiments: [demo]
    direction: above
    bound: 0.9
    unit: percent
"""


@pytest.fixture
def judged(results):
    """A copy of the report with judged claims, and the ledger."""
    ledger, folder = results / "claims.yaml", results / "report"
    ledger.write_text(LEDGER)
    claims = build.judge(ledger, results / "tables", ["demo"], folder)
    written(results, claims)
    return results, ledger


def written(results, claims):
    """Page, PDF and the folder, from claims as they lie."""
    where = (["demo"], results / "tables", results / "figures")
    folder = results / "report"
    page.write(*where, folder / "index.html", claims=claims)
    pdf.write(*where[:2], folder / "report.pdf", claims=claims)
    files = {"workflow": ROOT / "workflow/Snakefile", "citation": ROOT / "CITATION.cff"}
    bundle.write(*where, folder, also=(claims, claims.with_suffix(".tex")), **files)


def test_a_forged_verdict_is_named_though_the_whole_report_was_built_with_it(judged, tmp_path, capsys):
    results, ledger = judged
    folder, asked = results / "report", ["--results", str(results), "--ledger", str(ledger)]
    claims = folder / "claims.json"
    assert '"verdict": "inconclusive"' in claims.read_text()
    claims.write_text(claims.read_text().replace('"verdict": "inconclusive"', '"verdict": "supported"'))
    written(results, claims)
    for path in (results, folder):
        capsys.readouterr()
        assert main(["verify", str(path), *asked]) == 1
        said = capsys.readouterr().out
        assert "claims.json: waits has verdict 'supported'; judged again, 'inconclusive'" in said
    ledger.write_text(LEDGER.replace("0.9", "0.8"))
    assert main(["verify", str(folder), *asked]) == 1 and "waits has" in capsys.readouterr().out
    assert main(["verify", str(folder), *asked[:-1], str(tmp_path / "none.yaml")]) == 3
    assert "there is no ledger to judge the claims by" in capsys.readouterr().out
