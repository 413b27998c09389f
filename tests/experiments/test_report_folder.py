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
import pypdf
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image, PngImagePlugin
from pypdf.generic import DecodedStreamObject, NameObject

from tests import logs
from tests.once import once
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.tables import write_manifest
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, sha256_text
from tokenscale.cli.main import main
from tokenscale.report import build, bundle, page, pdf, save, verification
from tokenscale.report.table import Table, latex, markdown
from tokenscale.report.verification import CODE, DATA, FOREIGN, IDENTICAL, Finding, compare_claims, verify
from tokenscale.settings.closure import write_listing

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

ROOT = Path(__file__).parents[2]
FIGURE = "data_stall_share"


def tables(folder):
    """One small experiment's tables below `folder`."""
    table = logs.write_demo(folder, world_sizes=(1,), repeats=2, approaches=("padded", "packed"), figures=[FIGURE])
    ingest(table, folder / "runs", folder / "tables" / "demo")
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


def edited(results, output, number=None, edit=b""):
    """The report's PDF as another program saves it; `edit` is appended to the drawing commands of a page."""
    writer = pypdf.PdfWriter(clone_from=results / "report" / "report.pdf")
    if number is not None:
        stream = DecodedStreamObject()
        stream.set_data(writer.pages[number].get_contents().get_data() + edit)
        writer.pages[number][NameObject("/Contents")] = writer._add_object(stream)
    writer.write(output)
    return output


def slower(path):
    """The steps of one run take twice as long, in the table."""
    table = pq.read_table(path)
    run = pc.equal(table["run_id"], table["run_id"][0])
    step_s = pc.if_else(run, pc.multiply(table["step_s"], 2.0), table["step_s"])
    place = table.column_names.index("step_s")
    pq.write_table(table.set_column(place, table.schema.field(place), step_s), path)
    write_manifest(path.parent)
    return table["run_id"][0].as_py()


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
    assert bundle.read_sums(made / "report") == found


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


def test_every_drawing_carries_the_same_metadata(made):
    found = [save.read(drawing(made, kind)) for kind in save.DRAWN]
    assert found[0] == found[1] == found[2]
    assert found[0].keys() == save.KEYS
    assert found[0]["data"] == sha256_file(made / "report" / "data" / "demo" / f"{FIGURE}.csv")
    assert found[0]["tables"] == save.digest(made / "tables" / "demo")
    records = [read_json(path) for path in (made / "runs").glob("*/run.json")]
    assert found[0]["runs"] == {r["run_id"]: r["seal"][:16] for r in records}
    assert str(made) not in save.text(found[0])


def test_the_code_of_the_metadata_is_the_listing_that_the_rule_has(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(write_listing(*save.modules(FIGURE)))
    assert save.read(drawing(made))["code"] == sha256_text(path.read_text())


def test_the_page_does_not_carry_metadata(made):
    assert save.read(drawing(made))["data"] not in (made / "report" / "index.html").read_text()


def test_provenance_leads_from_a_figure_to_its_runs(made):
    record = read_json(made / "report" / "provenance.json")
    part = record["experiments"]["demo"]
    carried = save.read(drawing(made))
    assert part["figures"][FIGURE]["code"] == carried["code"]
    assert {run: facts["seal"][:16] for run, facts in part["runs"].items()} == carried["runs"]
    assert {facts["commit"] for facts in part["runs"].values()} == {"0123456789abcdef0123456789abcdef01234567"}
    assert record["packages"].keys() >= {"matplotlib", "duckdb", "python"}


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
    text = environment(results / "report", capsys)
    assert "duckdb==0.1\n" in text and f"# trained with numpy 1.0, torch 2.13.0: {one}\n" in text
    finding = Finding(str(results / "report"))
    verification._note_environments(finding, record, bundle.built_by())
    assert finding.verdict == IDENTICAL
    assert "the report was built with other packages: duckdb 0.1 then, " in "\n".join(finding.lines())
    assert f"numpy 1.0 then, {here} now" in finding.notes[1] and "runs were trained with other" in finding.notes[1]
    with pytest.raises(UserError, match="does not have the expected content"):
        verification._note_environments(finding, {"experiments": {"demo": {}}}, bundle.built_by())


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
    for name, sha256 in bundle.read_sums(made / "report").items():
        if name != "ro-crate-metadata.json":
            assert entities[name]["sha256"] == sha256
            assert entities[name]["contentSize"] == str((made / "report" / name).stat().st_size)
    described = {name for name, entity in entities.items() if "File" in entity["@type"]}
    root, head = entities["./"], entities["ro-crate-metadata.json"]
    assert described | {"ro-crate-metadata.json"} == bundle.read_sums(made / "report").keys()
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


@pytest.mark.parametrize("kind", save.DRAWN)
def test_a_figure_as_it_was_made_is_identical(made, kind):
    (finding,) = verify(drawing(made, kind), made)
    assert finding.verdict == IDENTICAL and not finding.lines()[1:]


def finding_of(folder):
    """The title of the figure in the PDF."""
    with save.Tables(folder / "tables" / "demo") as opened:
        return save.load_figure(FIGURE, opened).figure.finding()


def test_the_pages_of_the_pdf_that_were_edited_are_named(made, tmp_path):
    saved = edited(made, tmp_path / "saved.pdf")
    assert saved.read_bytes() != (made / "report" / "report.pdf").read_bytes()
    (finding,) = verify(saved, made)
    assert finding.verdict == IDENTICAL and "saved again" in finding.notes[0]
    (finding,) = verify(edited(made, tmp_path / "forged.pdf", 0, b"\n0 0 m 100 100 l S\n"), made)
    (differs,) = finding.differs
    assert finding.verdict == FOREIGN and differs.startswith("edited: pages that differ: 1 (")
    assert f"; {finding_of(made)}; " in differs, "the first page has the answers and the figure"


def test_an_edited_font_and_a_missing_page_of_the_pdf_are_named(made, tmp_path):
    writer = pypdf.PdfWriter(clone_from=made / "report" / "report.pdf")
    font = next(iter(writer.pages[0]["/Resources"]["/Font"].values())).get_object()
    font[NameObject("/BaseFont")] = NameObject("/Other")
    writer.write(tmp_path / "font.pdf")
    (finding,) = verify(tmp_path / "font.pdf", made)
    assert finding.verdict == FOREIGN and finding.differs == ["edited: its fonts are not those of the report"]
    writer = pypdf.PdfWriter(clone_from=made / "report" / "report.pdf")
    writer.remove_page(len(writer.pages) - 1)
    writer.write(tmp_path / "short.pdf")
    (finding,) = verify(tmp_path / "short.pdf", made)
    assert finding.verdict == FOREIGN and finding.differs == ["edited: pages are missing"]
    pages = pypdf.PdfWriter()
    pages.add_page(writer.pages[0])
    pages.write(tmp_path / "page.pdf")
    (finding,) = verify(tmp_path / "page.pdf", made)
    assert finding.verdict == FOREIGN and "no metadata of tokenscale" in finding.differs[0]


def test_an_edited_drawing_under_true_metadata_is_named(results):
    path = drawing(results)
    text = path.read_text()
    end = text.rindex("<text")
    path.write_text(text[:end] + text[end:].replace("<text", "<text opacity='0.9'", 1))
    (finding,) = verify(path, results)
    assert finding.verdict == FOREIGN and "edited" in finding.differs[0]
    pixels = Image.open(drawing(results, "png"))
    pixels.load()
    pixels.info.pop("dpi", None)
    said = PngImagePlugin.PngInfo()
    said.add_text(save.PNG_KEY, pixels.text[save.PNG_KEY])
    pixels.save(drawing(results, "png"), pnginfo=said, compress_level=1)
    (finding,) = verify(drawing(results, "png"), results)
    assert finding.verdict == IDENTICAL and "saved again" in finding.notes[0]
    pixels.putpixel((5, 5), (255, 0, 0, 255))
    pixels.save(drawing(results, "png"), pnginfo=said)
    (finding,) = verify(drawing(results, "png"), results)
    assert finding.verdict == FOREIGN


def test_metadata_that_lie_are_named(results):
    path = drawing(results)
    run = next(iter(save.read(path)["runs"]))
    path.write_text(path.read_text().replace(run, run[:-1] + "x"))
    (finding,) = verify(path, results)
    assert finding.verdict == FOREIGN
    assert any(f"{run[:-1]}x" in line for line in finding.differs)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text.replace("dc:description", "dc:relation"), "no metadata of tokenscale"),
        (lambda text: text.replace('"figure":', '"drawing":'), "not those that tokenscale writes"),
        (lambda text: text.replace('"runs":{', '"runs":{},"more":{'), "not those that tokenscale writes"),
    ],
)
def test_what_is_not_ours_is_called_so(results, edit, said):
    path = drawing(results)
    path.write_text(edit(path.read_text().replace("&quot;", '"')))
    (finding,) = verify(path, results)
    assert finding.verdict == FOREIGN and said in finding.differs[0]


def test_changed_tables_are_data_changed_and_the_run_is_named(results):
    run = slower(results / "tables" / "demo" / "steps.parquet")
    (finding,) = verify(drawing(results), results)
    assert finding.verdict == DATA
    assert any("query stalls" in line for line in finding.differs)
    assert any("1 of 4 rows" in line and run in line for line in finding.differs)
    (finding,) = verify(results / "report" / "report.pdf", results)
    assert finding.verdict == DATA and "the tables of demo have changed" in finding.differs
    assert "pages that differ: 1 (" in finding.differs[-1] and f"; {finding_of(results)}; " in finding.differs[-1]


def test_tables_that_change_nothing_of_a_figure_leave_it_identical(results):
    path = results / "tables" / "demo" / "spans.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")
    write_manifest(path.parent)
    (finding,) = verify(drawing(results), results)
    assert finding.verdict == IDENTICAL and "nothing that this figure shows" in finding.notes[0]


def test_an_edited_csv_is_found_from_the_figure_and_from_the_folder(results):
    csv = results / "report" / "data" / "demo" / f"{FIGURE}.csv"
    csv.write_text(csv.read_text().replace("0.", "1.", 1))
    (finding,) = verify(drawing(results), results)
    assert finding.verdict == DATA and csv.name in finding.differs[0]
    whole, *_ = verify(results / "report", results)
    assert whole.verdict == DATA and csv.name in whole.differs[0]


def test_changed_code_is_told_and_the_file_named(results, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sql = tmp_path / "src/tokenscale/analysis/sql/stalls.sql"
    sql.write_text(sql.read_text().replace("AS data_stall_share", "* 0.5 AS data_stall_share", 1))
    command = [sys.executable, "-m", "tokenscale", "verify", drawing(results), "--results", results]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{FIGURE}.svg: code changed\n" in done.stdout
    assert "definition of query stalls has changed" in done.stdout
    assert "source files have changed: tokenscale/analysis/sql/stalls.sql\n" in done.stdout


def test_a_folder_is_verified_file_by_file(results, capsys):
    folder = results / "report"
    assert main(["verify", str(folder / "SHA256SUMS"), "--results", str(results)]) == 0
    (folder / "figures/demo/more.svg").write_text("<svg/>")
    (folder / "sql/loss.sql").unlink()
    text = (folder / "tables/demo/throughput.md").read_text()
    (folder / "tables/demo/throughput.md").write_text(text.replace("1", "2"))
    lines = (folder / bundle.SUMS).read_text().splitlines()
    forged = sha256_file(folder / "tables/demo/throughput.md")
    lines = [f"{forged}  {line[66:]}" if line.endswith("throughput.md") else line for line in lines]
    (folder / bundle.SUMS).write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert main(["verify", str(folder / "index.html"), "--results", str(results)]) == 1
    said = capsys.readouterr().out
    assert "missing: sql/loss.sql" in said and "in no list of the report: figures/demo/more.svg" in said
    assert "tables/demo/throughput.md" in said, "a list of checksums that was forged with it hides nothing"


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


def checked(signed, signers=True):
    """What is said of signature and records; all else of `verify` draws the report again."""
    results, file = signed
    finding = Finding("report")
    verification._check_signature(finding, results / "report", file if signers else None)
    record = read_json(results / "report/provenance.json")
    verification._compare_records(finding, record, results / "report", results)
    return finding.verdict, "\n".join(finding.lines())


def test_a_signature_is_checked_against_the_signers_that_are_trusted(signed, tmp_path, capsys):
    results, signers = signed
    arguments = ["verify", str(results / "report"), "--results", str(results), "--signers", str(signers)]
    assert main(arguments) == 0 and "signed by me@host" in capsys.readouterr().out
    verdict, said = checked(signed, signers=False)
    assert verdict == IDENTICAL and "--signers FILE tells by whom" in said
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    (results / "report/SHA256SUMS.sig").unlink()
    assert checked(signed, signers=False) == (IDENTICAL, "report: identical")
    verdict, said = checked(signed)
    assert verdict == FOREIGN and "not signed" in said
    sign(results, tmp_path / "other")
    verdict, said = checked(signed)
    assert verdict == FOREIGN and "signed by nobody whom" in said


def test_a_list_that_was_made_anew_is_not_what_was_signed(signed):
    """Everything else fits: checksums are renewed by whoever edits."""
    results, _ = signed
    folder = results / "report"
    (folder / "README.md").write_text("edited")
    lines = [line for line in (folder / bundle.SUMS).read_text().splitlines() if not line.endswith("  README.md")]
    sums = [*lines, f"{sha256_file(folder / 'README.md')}  README.md"]
    (folder / bundle.SUMS).write_text("\n".join(sums) + "\n")
    verdict, said = checked(signed)
    assert verdict == FOREIGN and "SHA256SUMS is not what me@host signed" in said


def test_edited_and_spliced_records_and_missing_runs_are_named(signed):
    results, _ = signed
    one, two, three, four = sorted((results / "runs").iterdir())
    record = read_json(one / "run.json")
    (one / "run.json").write_text(json.dumps(record | {"parameters": 7}))
    logs.provenance.seal_record(two, read_json(two / "run.json") | {"parameters": 7}, record["outcome"])
    shutil.rmtree(three)
    verdict, said = checked(signed)
    assert verdict == DATA and "signed by me@host" in said
    assert f"records of runs were edited: {one.name}\n" in said
    assert f"runs have another sealed record than the report's: {two.name}\n" in said
    assert f"records of runs are gone: {three.name}\n" in said and four.name not in said
    for experiments in ([], {"demo": {"runs": {"../run": {}}}}, {"demo": {}}):
        with pytest.raises(UserError, match="does not have the expected content"):
            verification._compare_records(Finding(""), {"order": [], "experiments": experiments}, results, results)
    ingest(results / "runs.json", results / "runs", results / "tables/demo")
    assert f"runs of the plan that are missing: {three.name}" in checked(signed)[1]


def test_what_cannot_be_verified_is_a_users_error(results, tmp_path, capsys):
    (tmp_path / "no.pdf").write_text("no PDF")
    shutil.copytree(results / "report", tmp_path / "alone")
    for path, said in (
        (tmp_path / "none.svg", "no such file"),
        (tmp_path / "no.pdf", "no readable PDF"),
        (tmp_path, "no list of checksums"),
        (results / "report/README.md", "carries no metadata"),
        (tmp_path / "alone" / "figures/demo" / f"{FIGURE}.svg", "no tables of experiment 'demo'"),
    ):
        assert main(["verify", str(path), "--results", str(tmp_path / "empty")]) == 2
        assert said in capsys.readouterr().err


def test_metadata_name_no_path(results):
    path = drawing(results)
    path.write_text(path.read_text().replace('"experiment":"demo"', '"experiment":"../tables/demo"'))
    with pytest.raises(UserError, match="no tables of experiment"):
        verify(path, results)


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


def test_a_forged_verdict_is_named_though_the_whole_report_was_built_with_it(judged, capsys):
    results, ledger = judged
    folder = results / "report"
    asked = ["--results", str(results), "--ledger", str(ledger)]
    claims = folder / "claims.json"
    assert '"verdict": "inconclusive"' in claims.read_text()
    claims.write_text(claims.read_text().replace('"verdict": "inconclusive"', '"verdict": "supported"'))
    written(results, claims)
    capsys.readouterr()
    for file in (folder, folder / "report.pdf"):
        assert main(["verify", str(file), *asked]) == 1
        said = capsys.readouterr().out
        assert "not ours" in said and "waits has verdict 'supported'; judged again, 'inconclusive'" in said


def test_a_ledger_that_states_a_claim_otherwise_is_told_from_an_edit(judged, tmp_path, capsys):
    results, ledger = judged
    (tmp_path / "claims.yaml").write_text(LEDGER.replace("0.9", "0.8"))
    again = build.judge(tmp_path / "claims.yaml", results / "tables", ["demo"], tmp_path)
    finding = Finding("report")
    compare_claims(finding, results / "report" / "claims.json", again)
    assert finding.verdict == CODE and finding.differs == [
        "claims.json: the ledger states these claims otherwise: waits"
    ]
    asked = ["--results", str(results), "--ledger", str(tmp_path / "none.yaml")]
    assert main(["verify", str(results / "report" / "report.pdf"), *asked]) == 2
    assert "no ledger to judge the claims by" in capsys.readouterr().err
