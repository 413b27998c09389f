import html
import json
import math
import re

import pytest
from pypdf import PdfReader

from tests import logs, tables
from tests.experiments.conftest import EVIL
from tests.experiments.test_report import Reader
from tests.unit.test_planted_values import make_campaign
from tests.workflow.conftest import ROOT
from tokenscale.analysis.queries import query
from tokenscale.base.errors import UserError
from tokenscale.referee.claims import judge_claims
from tokenscale.report import answers, page, pdf, save, summary
from tokenscale.report.summary import generations_table
from tokenscale.settings.claims import load_claims

pytestmark = [pytest.mark.experiment, pytest.mark.slow(15)]


@pytest.fixture(scope="module")
def pages(demo_report):
    return {path.name: path.read_text() for path in demo_report.glob("*.html")}


def test_several_experiments_have_a_page_each_and_one_for_all(pages):
    text = pages["index.html"]
    own = pages["demo.html"]
    empty = pages["other.html"]
    references = set(Reader(text).references)
    assert {"demo.html", "other.html", "#originals"} <= references and "Another?" in text
    assert "Run inventory" not in text and 'id="definitions"' in text and 'id="claims"' in text
    assert (
        "Run inventory" in own
        and "index.html" in Reader(own).references
        and 'id="claims"' not in own
    )
    assert "The run table lists no run" in empty
    # what the source study did stands once, where its claims are
    assert text.count("All of it.") == 1 and "All of it." not in own + empty
    assert "Something." in text and html.escape("<script>alert(") in text


def test_a_report_without_the_studies_claims_tells_nothing_of_them(demo_report, tmp_path):
    own = tmp_path / "claims.json"
    whole = json.loads((demo_report / "claims.json").read_text())
    kept = [claim | {"study": ""} for claim in whole["claims"][:1]]
    own.write_text(json.dumps(whole | {"claims": kept, "replication": []}))
    figures = demo_report / "figures"
    parts = [summary.read(figures / name / summary.FILE) for name in ("demo", "other")]
    page.write(parts, figures, tmp_path / "index.html", claims=own)
    text = (tmp_path / "index.html").read_text()
    assert 'id="claims"' in text
    assert 'id="originals"' not in text and 'id="replication"' not in text
    assert "All of it." not in text


def test_every_reference_inside_the_pages_leads_somewhere(pages):
    found = {name: Reader(text) for name, text in pages.items()}
    for name, reader in found.items():
        assert "<script" not in pages[name] and len(reader.ids) == len(set(reader.ids))
        for reference in reader.references:
            file, _, place = reference.partition("#")
            if file.endswith(".html") or not file:
                assert not place or place in found[file or name].ids, (name, reference)
                assert not file or file in found, (name, reference)
            else:
                assert re.match(r"(figures|data|sql|\.\./\.\.)/|claims.json$", file), (
                    name,
                    reference,
                )


def test_claims_stand_with_their_verdicts_and_lead_to_their_figure(demo_report, pages, tmp_path):
    text = pages["one.html"]
    whole = json.loads((demo_report / "claims.json").read_text())
    judged = whole["claims"]
    tested = [claim for claim in judged if claim["experiment"]]
    assert 0 < len(tested) < len(judged)
    for claim in judged:
        assert (f'id="claim-{claim["id"]}"' in text) is (claim in tested)
        assert (html.escape(claim["claim"], quote=False) in html.unescape(text)) is (
            claim in tested
        )
    assert f"{len(judged) - len(tested)} claims about other corpora or scales" in text
    (stall,) = [c for c in judged if c["id"] == "slower-by-reading"]
    assert stall["verdict"] == "inconclusive" and 'href="#demo-figure-data_stall_share"' in text
    assert (
        '<span class="badge contradicted">contradicted</span>' in text
        and "it holds above 50.0 %" in text
    )
    part = summary.experiment("demo", demo_report / "tables")
    assert len(part["steadiness"].rows) == len(part["throughput"].rows)
    assert part["energy"] == "" and "Energy was not measured" in text
    assert 'id="claims"' not in pages["no_claims.html"]
    for claim in judged:  # what ledgers say is text
        claim |= dict.fromkeys(
            ("claim", "figure", "sentence", "remark", "document", "where", "reason"), EVIL
        )
    (tmp_path / "claims.json").write_text(json.dumps(whole))
    figures = demo_report / "figures"
    page.write([part], figures, tmp_path / "index.html", claims=tmp_path / "claims.json")
    assert "<script" not in (tmp_path / "index.html").read_text()


# -- definitions that only these pages ask


def test_energy_is_of_attempts_that_every_rank_reported(tmp_path):
    def stop(run_id, attempt, rank, joules):
        return {
            "run_id": run_id,
            "attempt": attempt,
            "rank": rank,
            "event": "run_stop",
            "energy_j": joules,
        }

    runs = [tables.run(name, world_size=2) for name in ("whole", "lost", "silent", "resumed")]
    steps = [s for r in runs for s in tables.steps(r["run_id"], 5, 2)]
    steps += [s | {"attempt": 1, "step": 5 + s["step"]} for s in tables.steps("resumed", 3, 2)]
    events = [stop("whole", 0, 0, 100.0), stop("whole", 0, 1, 200.0)]
    events += [stop("lost", 0, 0, 100.0)]  # the other rank was killed
    events += [stop("silent", 0, 0, None), stop("silent", 0, 1, None)]
    events += [stop("resumed", 1, 0, 60.0), stop("resumed", 1, 1, 120.0)]  # attempt 0 was killed
    tables.write(tmp_path, runs=runs, steps=steps, events=events)
    rows = query("energy", tmp_path).set_index("run_id")
    assert rows.loc["whole", "energy_j"] == 300 and rows.loc[
        "whole", "j_per_useful_token"
    ] == 300 / (5 * 2 * 30)
    assert rows.loc[["lost", "silent"], "energy_j"].isna().all()
    assert rows.loc["resumed", "energy_j"] == 180 and rows.loc[
        "resumed", "j_per_useful_token"
    ] == 180 / (3 * 2 * 30)


def test_step_times_are_of_the_slowest_rank_after_warm_up(tmp_path):
    runs = [
        tables.run("two", world_size=2),
        tables.run("one"),
        tables.run("bad", validity="invalid"),
    ]
    steps = tables.steps(
        "two", 7, 2, step_s=lambda step, rank: 100.0 if step < 3 else step + 0.5 * rank
    )
    steps += tables.steps("one", 7) + tables.steps("bad", 7)
    # a step that lacks a rank
    steps = [s for s in steps if (s["run_id"], s["step"], s["rank"]) != ("two", 6, 1)]
    tables.write(tmp_path, runs=runs, steps=steps)
    rows = query("step_times", tmp_path).set_index("run_id")
    assert set(rows.index) == {"one", "two"}
    two = rows.loc["two"]  # 3.5, 4.5, 5.5 s
    assert (two["steps"], two["median_s"], two["slowest_s"], two["late_s"]) == (3, 4.5, 5.5, 0.5)
    assert two["p95_s"] == pytest.approx(5.4) and two["iqr_share"] == pytest.approx(1 / 4.5)
    assert rows.loc["one", "iqr_share"] == 0 and math.isnan(rows.loc["one", "late_s"])


def test_a_rank_that_is_slow_for_a_stretch_is_named_with_its_node_and_time(tmp_path):
    """Rank 2 of 4 computes half longer in steps 140 to 219; the step is as long as its slowest
    rank's.
    """
    slow = range(140, 220)
    of = {"slow": {"node_names": "a, b"}, "even": {}, "shared": {"oversubscribed": True}}
    of |= {"staged": {"pipeline": 2}}  # the second stage computes longer: no straggler
    runs = [
        tables.run(name, world_size=4, repeat=n, **fields)
        for n, (name, fields) in enumerate(of.items())
    ]

    def parts(late, longer=0.06):
        return {
            "step_s": 0.1,
            "t_unix_s": lambda step, rank: 1.7e9 + 0.1 * (step + 1),
            "forward_s": lambda step, rank: 0.02 + 0.0002 * ((step * 7 + rank * 3) % 5),
            "backward_s": lambda step, rank: longer if late(step, rank) else 0.04,
        }

    late = parts(lambda step, rank: rank == 2 and step in slow)
    steps = tables.steps("slow", 400, 4, **late) + tables.steps("shared", 400, 4, **late)
    # each in its turn
    steps += tables.steps("even", 400, 4, **parts(lambda step, rank: rank == step % 4))
    steps += tables.steps("staged", 400, 4, **parts(lambda step, rank: rank >= 2, 0.08))
    tables.write(tmp_path, runs=runs, steps=steps)
    (row,) = query("stragglers", tmp_path).to_dict("records")
    assert (row["run_id"], row["rank"], row["node"], row["first_step"], row["last_step"]) == (
        "slow",
        2,
        "b",
        140,
        219,
    )
    assert row["slowdown"] == pytest.approx(0.08 / 0.06, rel=0.02) and row[
        "lost_s"
    ] == pytest.approx(1.6, rel=0.02)
    assert row["part"] == "the backward pass" and row["started_unix_s"] == pytest.approx(1.7e9 + 14)
    assert answers.find_cautions(*make_campaign(), query("stragglers", tmp_path)) == [
        "Rank 2 of slow on b was 1.33 times slower than its peers in steps 140 to 219 "
        "(2023-11-14 22:13:34 to 22:13:42 "
        "UTC), mostly in the backward pass, 1.6 s in all."
    ]


def test_changed_tables_and_descriptions_are_refused(tmp_path):
    of = {"quarantined": 0, "sealed": True}
    runs = [
        tables.run(f"{a}-0", approach=a, cell=f"approach={a}", **of) for a in ("padded", "packed")
    ]
    tables.write(
        tmp_path / "demo", runs=runs, steps=[s for r in runs for s in tables.steps(r["run_id"], 8)]
    )
    description = tmp_path / summary.FILE
    summary.write("demo", tmp_path, description)
    path = tmp_path / "demo/steps.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="changed since it was written"):
        summary.experiment("demo", tmp_path)
    assert summary.read(description)["runs"] == 2
    description.write_text(description.read_text().replace('"runs": 2', '"runs": 3'))
    with pytest.raises(UserError, match=r"changed since it was written[\s\S]*snakemake -f"):
        summary.read(description)


# -- what models wrote: text, whatever it holds, on the page and in the PDF

PROMPTS = ("Once <script>alert(1)</script>", "a\x00b\x1b[31m é 漢 $x^2$ {{ 7 * 7 }}", "")
FIGURE = "inference_tokens_per_second"


def ingested(folder, measured):
    head = {"experiment": "inference", "figures": [FIGURE]}
    return logs.ingested(folder, [], measured, to="tables/inference", **head)


def made(folder, measured):
    save.save(FIGURE, ingested(folder, measured), folder / "figures/inference" / FIGURE)
    part = summary.experiment("inference", folder / "tables")
    page.write_experiment(part, folder / "figures", folder / "inference.html")
    pdf.write([part], folder / "figures", folder / "report.pdf")
    return (folder / "inference.html").read_text()


def test_prompts_and_texts_stand_on_the_page_and_in_the_pdf_as_text(tmp_path):
    text = made(
        tmp_path,
        [logs.write_inference_benchmark(tmp_path / "bench.json", rounds=8, prompts=PROMPTS)],
    )
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
    """Faster at the longest text, where the texts are the same; and those that are not contradict
    the other claim.
    """
    ingested(
        tmp_path,
        [logs.write_inference_benchmark(tmp_path / "bench.json", rounds=8, differs=differs)],
    )
    ledger = load_claims(ROOT / "config/claims.yaml")
    judged = {one.id: one for one in judge_claims(ledger, tmp_path / "tables", ["inference"])}
    faster, same, size = (judged[f"kv-cache-{name}"] for name in ("faster", "same-text", "bytes"))
    assert size.verdict == "supported" and same.verdict == (
        "contradicted" if differs else "supported"
    )
    assert faster.verdict == ("not tested at this scale" if differs else "supported")
    assert differs or "12 new ones each" in faster.sentence
    (tmp_path / "none").mkdir()
    ingested(tmp_path / "none", [])
    judged = {one.id: one for one in judge_claims(ledger, tmp_path / "none/tables", ["inference"])}
    assert {judged[f"kv-cache-{n}"].verdict for n in ("faster", "same-text", "bytes")} == {
        "not tested at this scale"
    }
