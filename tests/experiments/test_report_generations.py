"""What models wrote, in the report: as text, whatever it holds, on the page and in the PDF."""

import pytest
from pypdf import PdfReader

from tests import logs
from tests.experiments.test_report import Reader
from tests.unit.test_analysis_claims import ROOT
from tokenscale.analysis.claims import judge
from tokenscale.analysis.queries import query
from tokenscale.report import page, pdf, save
from tokenscale.report.summary import generations_table
from tokenscale.settings.claims import load_claims

pytestmark = [pytest.mark.experiment, pytest.mark.slow(9)]

PROMPTS = ("Once <script>alert(1)</script>", "a\x00b\x1b[31m é 漢 $x^2$ {{ 7 * 7 }}", "")
FIGURE = "inference_tokens_per_second"


def ingested(folder, measured):
    head = {"experiment": "inference", "figures": [FIGURE]}
    return logs.ingested(folder, [], measured, to="tables/inference", **head)


def made(folder, measured):
    save.save(FIGURE, ingested(folder, measured), folder / "figures/inference" / FIGURE)
    page.write_experiment("inference", folder / "tables", folder / "figures", folder / "inference.html")
    pdf.write(["inference"], folder / "tables", folder / "report.pdf", figures=folder / "figures")
    return (folder / "inference.html").read_text()


def test_prompts_and_texts_stand_on_the_page_and_in_the_pdf_as_text(tmp_path):
    text = made(tmp_path, [logs.write_inference_benchmark(tmp_path / "bench.json", rounds=8, prompts=PROMPTS)])
    assert "Once &lt;script&gt;alert(1)&lt;/script&gt;" in text and "<script" not in text
    assert "a↵b &amp; c" in text and "temperature 0.8, top_p 0.95, seed 3" in text
    assert "a\ufffdb\ufffd[31m é 漢 $x^2$ {{ 7 * 7 }}" in text and "\x00" not in text
    assert "3 of 3 answers are the same, token by token" in text
    reader = Reader(text)
    assert "inference-generations" in reader.ids and len(reader.ids) == len(set(reader.ids))
    assert '<td class="n">10 (10–10)</td>' in text  # the speed-up, in the table below the figure
    shown = "".join(page.extract_text() for page in PdfReader(tmp_path / "report.pdf").pages)
    assert "Generated texts" in shown and "<script>alert(1)</script>" in shown.replace("\n", "")
    assert "漢" not in shown and "\ufffd" in shown  # letters that the fonts lack


def test_where_nothing_was_written_the_report_says_nothing_of_it(tmp_path):
    text = made(tmp_path, [])
    assert "Generated texts" not in text and "No inference benchmark was given" in text
    assert generations_table(query("generations", tmp_path / "tables/inference")).rows == []


@pytest.mark.parametrize("differs", [False, True])
def test_claims_are_judged_by_what_was_written(tmp_path, differs):
    """Faster at the longest text, where the texts are the same; and those that are not contradict the other claim."""
    ingested(tmp_path, [logs.write_inference_benchmark(tmp_path / "bench.json", rounds=8, differs=differs)])
    ledger = load_claims(ROOT / "config/claims.yaml")
    judged = {one.id: one for one in judge(ledger, tmp_path / "tables", ["inference"])}
    faster, same, size = (judged[f"kv-cache-{name}"] for name in ("faster", "same-text", "bytes"))
    assert size.verdict == "supported" and same.verdict == ("contradicted" if differs else "supported")
    assert faster.verdict == ("not tested at this scale" if differs else "supported")
    assert differs or "12 new ones each" in faster.sentence
    (tmp_path / "none").mkdir()
    ingested(tmp_path / "none", [])
    judged = {one.id: one for one in judge(ledger, tmp_path / "none/tables", ["inference"])}
    assert {judged[f"kv-cache-{n}"].verdict for n in ("faster", "same-text", "bytes")} == {"not tested at this scale"}
