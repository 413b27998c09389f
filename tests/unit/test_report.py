"""The page and the PDF: self-contained, escaped, honest about few runs, rebuilt with equal bytes."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import connect
from tokenscale.cli import main
from tokenscale.report import page, pdf, registry, save, summary

EVIL = "<script>alert('x')</script> & \"co\""


def build(folder, drawn=True, bench=True, **options):
    """Tables and figures below `folder/results`; the page's text."""
    table = logs.write_demo(folder, **options)
    ingest(table, folder / "runs", folder / "tables" / "demo", [folder / "bench.json"] if bench else [])
    with connect(folder / "tables" / "demo") as connection:
        for name in registry.FIGURES if drawn else ():
            save.save(name, connection, folder / "figures" / "demo" / name)
    page.write(["demo"], folder / "tables", folder / "figures", folder / "index.html")
    return (folder / "index.html").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    return folder, build(folder, question=EVIL, note=EVIL)


class Reader(HTMLParser):
    """Collects tags, references, ids and visible text; fails on what a page of ours must not have."""

    def __init__(self, text):
        super().__init__()
        self.tag = ""
        self.tags, self.references, self.ids, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        self.tags.append(tag)
        for name, value in attributes:
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "action", "poster"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), f"{name} would be a script"

    def handle_data(self, data):
        if self.tag != "style":
            self.text.append(data)


def test_the_page_refers_to_nothing_outside(site):
    read = Reader(site[1])
    assert read.references
    for reference in read.references:
        assert reference.startswith("#")
        assert reference[1:] in read.ids
    assert "script" not in read.tags and "link" not in read.tags and "iframe" not in read.tags
    assert not re.search(r"url\((?!#)|@import", site[1])
    assert "default-src 'none'" in site[1]


def test_ids_are_unique(site):
    ids = Reader(site[1]).ids
    assert len(ids) == len(set(ids))


def test_what_users_write_is_text(site):
    assert "<script" not in site[1]
    assert EVIL in "".join(Reader(site[1]).text)


def test_all_figures_and_parts_are_there(site):
    assert Reader(site[1]).tags.count("svg") == 5
    for words in (
        "Run inventory",
        "Same data",
        "Offline against online",
        "Validation loss",
        "demo scale",
        "Definitions",
    ):
        assert words in site[1]


def test_few_runs_never_get_a_confident_word(site):
    text = "".join(Reader(site[1]).text)
    assert "95 %" not in text
    assert "too few runs" in text
    assert "faster" not in text


def test_enough_runs_get_a_verdict(tmp_path):
    text = build(tmp_path, drawn=False, world_sizes=(1,), repeats=9)
    part = summary.experiment("demo", tmp_path / "tables")
    assert {a["verdict"] for a in part["answers"]} == {"faster"}
    assert "order-statistic interval" in text


def test_the_same_data_is_proven_or_not(site, tmp_path):
    assert "Same data across world sizes: proven. All 15 pairs" in site[1]
    path = next((site[0] / "runs").glob("packed-*-w2-*/attempt=00/rank=00001/steps.jsonl"))
    before = path.read_text()
    path.write_text(before.replace('"order_digest":', '"order_digest":1', 1))
    ingest(site[0] / "runs.json", site[0] / "runs", tmp_path / "demo")
    path.write_text(before)
    (proof, _) = summary.experiment("demo", tmp_path)["proof"]["parts"]
    assert proof["state"] == "broken"
    assert "14 of 15 pairs" in proof["text"]


def test_page_and_pdf_are_rebuilt_with_equal_bytes(site):
    folder, text = site
    page.write(["demo"], folder / "tables", folder / "figures", folder / "again.html")
    assert (folder / "again.html").read_text() == text
    for name in ("a.pdf", "b.pdf"):
        pdf.write(["demo"], folder / "tables", folder / name)
    assert (folder / "a.pdf").read_bytes() == (folder / "b.pdf").read_bytes()
    assert (folder / "a.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "a.pdf").read_bytes().count(b"/Type /Page ") == 6


@pytest.mark.parametrize("listed", [0, 4])
def test_an_experiment_without_any_data_has_its_page(tmp_path, listed):
    runs = [logs.settings(a) for a in logs.APPROACHES[:listed]]
    ingest(logs.write_table(tmp_path / "runs.json", runs), tmp_path / "runs", tmp_path / "tables" / "demo")
    page.write(["demo"], tmp_path / "tables", tmp_path / "figures", tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "This figure has not been made" in text
    assert "no pair of runs to compare" in text
    assert text.count("missing") >= listed
    pdf.write(["demo"], tmp_path / "tables", tmp_path / "report.pdf")


def test_two_experiments_share_a_page(tmp_path):
    build(tmp_path, world_sizes=(1,), repeats=1)
    table = logs.write_table(tmp_path / "other.json", [], experiment="other", question="Another?")
    ingest(table, tmp_path / "runs", tmp_path / "tables" / "other")
    page.write(["demo", "other"], tmp_path / "tables", tmp_path / "figures", tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "Another?" in text
    ids = Reader(text).ids
    assert len(ids) == len(set(ids))


def test_the_report_needs_neither_torch_nor_snakemake(site):
    code = (
        "import sys; from tokenscale.cli import main; "
        f"assert main(['report','figure','loss_over_time','--tables',{str(site[0] / 'tables' / 'demo')!r},"
        f"'--output',{str(site[0] / 'cli' / 'loss')!r}]) == 0; "
        f"assert main(['report','page','--experiments','demo','--tables',{str(site[0] / 'tables')!r},"
        f"'--figures',{str(site[0] / 'figures')!r},'--output',{str(site[0] / 'cli' / 'index.html')!r}]) == 0; "
        f"assert main(['ingest','--experiment',{str(site[0] / 'runs.json')!r},'--runs',{str(site[0] / 'runs')!r},"
        f"'--output',{str(site[0] / 'cli' / 'tables')!r}]) == 0; "
        "print(sorted({'torch','transformers','snakemake','pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_misspelt_figures_are_mended(capsys, tmp_path):
    assert main(["report", "figure", "loss", "--tables", str(tmp_path), "--output", str(tmp_path / "x")]) == 2
    assert "loss_over_time" in capsys.readouterr().err
