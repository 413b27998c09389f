import html
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pypdf import PdfReader

from tests import logs
from tests.experiments.conftest import EVIL
from tokenscale.analysis import queries
from tokenscale.analysis.queries import connect, query
from tokenscale.base.errors import UserError
from tokenscale.report import campaign_quality, page, paired_comparisons, pdf, summary
from tokenscale.report.captions import OVERSUBSCRIBED, SHARED_CORES
from tokenscale.report.figure import figure_class
from tokenscale.settings.closure import import_closure
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(60)]


#: what `queries.connect` itself reads
VIEWS = {"steps_global", "validation"}


@pytest.fixture(scope="module")
def text(demo_report):
    return (demo_report / "no_claims.html").read_text()


class Reader(HTMLParser):
    """Collects tags, references, ids and visible text; fails on what a page of ours must not
    have.
    """

    def __init__(self, text):
        super().__init__()
        self.tag = ""
        self.open = []
        self.wide = []
        self.drawings = []
        self.tags = []
        self.references = []
        self.ids = []
        self.text = []
        self.feed(text)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        self.tags.append(tag)
        if tag == "table" and not any("scroll" in classes.split() for _, classes in self.open):
            self.wide.append(tag)
        if tag == "svg":
            self.drawings.append(dict(attributes))
        self.open.append((tag, dict(attributes).get("class") or ""))
        for name, value in attributes:
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "action", "poster"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), f"{name} would be a script"

    def handle_data(self, data):
        if self.tag != "style":
            self.text.append(data)


def test_the_page_refers_to_nothing_outside(text):
    read = Reader(text)
    assert read.references
    for reference in read.references:  # to places of the page, or to files of its own folder
        assert (
            reference[0] == "#"
            or reference.split("/")[0] in ("figures", "data", "sql")
            and ".." not in reference
        )
    assert not {"script", "link", "iframe"} & {*read.tags} and "<script" not in text
    assert EVIL in "".join(read.text), "what users write is text"
    assert len(read.ids) == len(set(read.ids))
    used = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', text)
    assert {name for pair in used for name in pair if name} <= set(read.ids)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text


def test_tables_scroll_and_every_drawing_has_one_for_a_phone(demo_report, text):
    """Letters of the drawing for a phone are at least as large on 340 px as on the drawing itself:
    9 points or more.
    """
    reader = Reader(text)
    assert reader.wide == []
    assert all(drawing["aria-hidden"] == "true" for drawing in reader.drawings), (
        "the text beside it is read"
    )
    wide, phone = (
        [d for d in reader.drawings if d["class"] == which] for which in ("wide", "phone")
    )
    assert len(wide) == len(phone) == len(reader.drawings) / 2 > 10
    for drawing in phone:
        _, _, width, height = map(float, drawing["viewbox"].split())
        assert width <= 340 and 100 < height < 3000
    panels = [float(d["viewbox"].split()[3]) for d in (*wide, *phone)]
    assert max(panels[len(wide) :]) > 1.5 * max(panels[: len(wide)]), "panels are below one another"
    drawn = [
        json.loads((demo_report / f"figures/demo/{name}.json").read_text()) for name in FIGURES
    ]
    alts = [texts["alt"] for texts in drawn if not texts["folded"]]
    assert all(f'role="img" aria-label="{html.escape(alt[:20])}' in text for alt in alts)


def visible_words(text):
    """Words of a page, also the folded ones, without those of drawings."""
    text = re.sub(r"(?s)<(style|svg|title)\b.*?</\1>|<[^>]+>", " ", text)
    return html.unescape(text).split()


def test_a_page_is_short_says_each_caution_once_and_opens_few_figures(demo_report, text):
    assert len(visible_words(text)) <= 9000
    part = summary.experiment("demo", demo_report / "tables")
    words = " ".join(visible_words(text))
    cautions = summary.list_cautions(part)
    part = page._build_figures(part, demo_report / "figures")
    for caution in (*cautions, *part["methods"]):
        assert words.count(caution.rstrip(".").removesuffix(" (world sizes above one)")) == 1, (
            caution
        )
    names = [f["name"] for f in (part["picture"], *part["drawn"], *part["more"], *part["empty"])]
    assert sorted(names) == sorted(FIGURES) and 1 + len(part["drawn"]) == page.OPEN and part["more"]
    drawn = text[text.index('id="demo-figure-parallel_methods"') :]
    assert "memory per device (MB)" in drawn[: drawn.index("<details>")], (
        "its table is read without opening anything"
    )


@pytest.mark.parametrize(
    ("repeats", "quantity", "verdict"),
    [
        (6, "useful_tokens_per_s", "faster, with drift"),
        (5, "useful_tokens_per_s", "too few runs"),
        (6, "validation_loss", "higher loss|lower loss|equivalent|no difference"),
    ],
)
def test_only_primary_comparisons_are_tested_and_answer(tmp_path, repeats, quantity, verdict):
    names = ["approach=packed", "approach=padded"]
    of, over = (f"{name}, layout.data=1" for name in names)
    primary = {"of": of, "over": over, "names": names, "at": "layout.data=1", "factor": "approach"}
    left_out = [{"cells": {"layout": {"data": 2}, "approach": "padded"}, "reason": EVIL}]
    runs = [logs.settings(a, repeat=r) for r in range(repeats) for a in logs.APPROACHES]
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    logs.ingested(
        tmp_path,
        runs,
        to="tables/demo",
        primary=[primary | {"quantity": quantity}],
        left_out=left_out,
    )
    part = summary.experiment("demo", tmp_path / "tables")
    kinds = paired_comparisons.VERDICT_WORDS
    (answer,) = [answer for answer in part["answers"] if answer["verdict"].split(",")[0] in kinds]
    assert re.match(verdict, answer["verdict"])
    names = [name for name, _ in part["comparisons"].columns]
    rows = [dict(zip(names, row, strict=True)) for row in part["comparisons"].rows]
    if quantity == "validation_loss":
        assert "the validation loss of padded" in answer["text"] and answer["part"] == "loss"
        assert len(rows) == 5, "speeds of the same cells stay as an exploratory comparison"
        return
    assert answer["text"].startswith("1 data-parallel rank: packed trains on ")
    assert [row["verdict"] for row in rows] == [verdict, *["exploratory"] * 3]
    assert float(rows[0]["smallest possible p"]) == pytest.approx(2 / 2**repeats, rel=0.1), (
        "a family of one"
    )
    assert {row["p (Holm)"] for row in rows[1:]} == {"–"}
    page.write([part], tmp_path, tmp_path / "index.html")
    said = "".join(Reader((tmp_path / "index.html").read_text()).text)
    assert f"Not run: approach=padded, layout.data=2 ({EVIL})." in said


TWINS = [logs.settings(a, repeat=r) for a in ("padding-free", "token-list") for r in range(2)]
WORLDS = [logs.settings("packed", w) for w in (1, 2)]


@pytest.mark.parametrize(
    ("runs", "edit", "state", "said"),
    [
        (
            TWINS,
            lambda line: {},
            "proven",
            "All 2 pairs have the same samples, the same useful tokens, and bit-identical losses",
        ),
        (
            TWINS,
            lambda line: {"loss_sum": line["loss_sum"] * (1 + 1e-15)},
            "broken",
            "1 pair: same order, losses differ: not proven",
        ),
        (
            TWINS,
            lambda line: {"order_digest": line["order_digest"] ^ 1},
            "broken",
            "other samples or another order: not proven",
        ),
        # of 7,946 useful tokens together, nats a token
        (
            WORLDS,
            lambda line: {"loss_sum": line["loss_sum"] + 0.1},
            "proven",
            f"differ by up to {0.1 / 7946:.2g}",
        ),
        (
            WORLDS,
            lambda line: {"loss_sum": line["loss_sum"] + 1},
            "broken",
            f"differ by up to {1 / 7946:.2g}",
        ),
    ],
)
def test_equal_data_are_proven_by_samples_and_losses(tmp_path, runs, edit, state, said):
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    first = min((tmp_path / "runs").glob("token-list-*" if runs is TWINS else "packed-*-w2-*"))
    logs.edit(first, lambda line: line | (edit(line) if line["step"] == 4 else {}), rank="00000")
    logs.ingested(tmp_path, runs, to="demo")
    part = summary.experiment("demo", tmp_path)["proof"]["parts"][runs is TWINS]
    assert part["state"] == state and said in part["text"]


def test_other_useful_tokens_are_other_data(demo_report, text):
    assert "Same data across world sizes: proven. All 15 pairs" in text
    order = query("order", demo_report / "tables/demo").assign(same_useful_tokens=False)
    part, _ = campaign_quality.proof(order)["parts"]
    assert part["state"] == "broken" and "useful tokens differ: not proven" in part["text"]


@pytest.mark.parametrize(
    ("threads", "device", "said"),
    [
        ((2, 2), {}, OVERSUBSCRIBED),
        ((2, 1), {}, SHARED_CORES),
        ((1, 1), {}, None),
        ((2, 2), {"device": "A GPU"}, None),
    ],
)
def test_page_cover_and_figures_say_alike_that_cores_are_shared(tmp_path, threads, device, said):
    runs = [logs.settings(world_size=w) for w in (1, 2)]
    device = logs.HARDWARE | device | {"device_kind": "cuda" if device else "cpu"}
    of = {
        run.identity: device | {"threads_per_rank": n} for run, n in zip(runs, threads, strict=True)
    }
    logs.made(tmp_path, runs, to="tables/demo", hardware=lambda run: of[run.identity])
    part = summary.experiment("demo", tmp_path / "tables")
    page.write([part], tmp_path / "figures", tmp_path / "index.html")
    assert part["caution"] == (said or "")
    texts = [
        (tmp_path / "index.html").read_text(),
        " ".join(text.get_text() for text in front([part]).texts),
    ]
    with connect(tmp_path / "tables" / "demo") as connection:
        for name in ("scaling_throughput", "training_time", "step_time_breakdown"):
            kind = figure_class(name)
            figure = kind(*(queries.query(name, connection) for name in kind.queries))
            drawn = [
                text.get_text()
                for text in figure.draw().findobj(lambda artist: hasattr(artist, "get_text"))
            ]
            assert [text for text in drawn if text in (OVERSUBSCRIBED, SHARED_CORES)] == (
                [said] if said else []
            ), name
            texts.append(figure.caption())
    for text, words in itertools.product(texts, (OVERSUBSCRIBED, SHARED_CORES)):
        assert (words[1:] in text) is (words == said)


def front(parts):
    """The first page of the PDF."""
    writer = pdf.PageWriter("tokenscale report")
    pdf._write_front(writer, parts, [])
    (page,) = writer.figures
    return page


def answer(number, verdict="too few runs"):
    text = (
        f"a_factor=a level with a long name: packed-{number} trains on {number} × as many useful "
        "tokens"
    )
    spread = "1–1, 6 pairs, 95 % interval"
    return {
        "part": "throughput",
        "text": f"{text} a second as padded",
        "spread": spread,
        "verdict": verdict,
        "figure": "",
    }


def test_of_many_answers_those_that_are_decided_are_told_and_the_others_counted():
    few = [answer(n) for n in range(4)]
    decided = [answer(n, "faster") for n in range(5)]
    told = [
        paired_comparisons.select_answers(of, 3)
        for of in (few[:3], few, few[:3] + decided[:2], few + decided)
    ]
    assert [of for of, _ in told] == [few[:3], [], decided[:2], decided[:3]]
    assert ["too few runs" in more for _, more in told] == [
        False,
        True,
        True,
        False,
    ] and "6 more" in told[3][1]


def test_an_experiment_with_many_answers_fills_neither_the_first_page_nor_the_cover(demo_report):
    part, other = (summary.experiment(name, demo_report / "tables") for name in ("demo", "other"))
    part |= {
        "answers": [answer(n, "faster") for n in range(40)],
        "note": "A word of the note. " * 60,
    }
    part["question"] = (
        "Which of the many ways from text to rows trains fastest, and does that depend on the "
        "rows? "
    ) * 3
    other |= {"text": "corpus other, tokenizer other"}
    of_pages = [found | {"href": f"{found['name']}.html"} for found in (part, other)]
    said = page.render(of_pages, "x", [])
    assert said.count("as many useful tokens") < 10 and "37 more answers" in said
    assert (
        f"<dt>text, all others</dt><dd>{part['text']}" in said
        and "<dt>text</dt><dd>corpus other" in said
    )
    assert page.render(of_pages[:1], "x", []).count("as many useful tokens") >= 40
    cover = front([part])
    lines = " ".join(text.get_text() for text in cover.texts)
    edges = [text.get_window_extent(FigureCanvasAgg(cover).get_renderer()) for text in cover.texts]
    assert (
        min(edge.y0 for edge in edges) > 0 and max(edge.x1 for edge in edges) < cover.bbox.x1 - 20
    )
    assert "This is demo scale" in lines and "32 more answers: see its chapter." in lines


def test_a_stopped_run_is_on_the_page_and_in_no_number(tmp_path):
    runs = [logs.settings(a, repeat=r) for a in ("padded", "packed") for r in range(3)]
    bad = logs.settings("packed", repeat=1)
    logs.made(
        tmp_path,
        runs,
        to="tables/demo",
        attempts=lambda run: [{"diverges": 8}] if run == bad else None,
    )
    part = summary.experiment("demo", tmp_path / "tables")
    assert part["validity"] == {"valid": 5, "suspect": 0, "invalid": 1, "missing": 0}
    assert part["design"].rows[0][1:] == ["valid", "nonfinite", "valid", "2 of 3"]
    (row,) = [row for row in part["inventory"].rows if row[2] == "nonfinite"]
    assert row[1] == "invalid"
    assert "training stopped: loss or gradient not finite at step 8 of 12" in row[3]
    assert [row[2] for row in part["throughput"].rows] == ["3", "2"]
    assert [row[2] for row in part["comparisons"].rows] == ["2"]
    assert "Left out: 1 invalid run of 6." in part["throughput"].caption
    page.write([part], tmp_path / "figures", tmp_path / "index.html")
    assert '<span class="badge nonfinite">nonfinite</span>' in (tmp_path / "index.html").read_text()


def test_modules_name_the_queries_and_files_that_they_use(demo_report, tmp_path, monkeypatch):
    """By these names a rule finds the code that its output depends on."""
    asked = set()
    opened = set()
    sql = queries.sql
    read = page._read_asset
    monkeypatch.setattr(queries, "sql", lambda name: asked.add(name) or sql(name))
    monkeypatch.setattr(page, "_read_asset", lambda name: opened.add(name) or read(name))
    part = summary.experiment("demo", demo_report / "tables")
    # no primary comparison of the demo is of the loss in training
    assert asked == set(summary.QUERIES) - {"training_loss"} | VIEWS
    asked.clear()
    figures = demo_report / "figures"
    page.write([part], figures, tmp_path / "a.html", claims=demo_report / "claims.json")
    assert asked == set(), "the page only links the definitions"
    assert opened == set(page.FILES) and all(
        (Path(page.__file__).parent / name).is_file() for name in opened
    )
    for figure, module in FIGURES.items():  # the code of a figure is found by what its class names
        kind = figure_class(figure)
        assert kind.__module__ == module
        assert set(kind.queries) <= {Path(file).stem for file in import_closure(module)}


@pytest.mark.long
def test_page_and_pdf_are_rebuilt_with_equal_bytes_and_each_figure_is_on_a_page(
    demo_report, tmp_path
):
    """Of the description in the file, and of the one that was just made."""
    part = summary.experiment("demo", demo_report / "tables")
    figures = tmp_path / "figures"
    shutil.copytree(demo_report / "figures", figures)
    page.write([part], figures, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (demo_report / "no_claims.html").read_bytes()
    pdf.write([part], figures, tmp_path / "report.pdf")
    whole = (demo_report / "report.pdf").read_bytes()
    assert (tmp_path / "report.pdf").read_bytes() == whole and whole.startswith(b"%PDF")
    texts = {name: json.loads((figures / f"demo/{name}.json").read_text()) for name in FIGURES}
    said = [
        " ".join(found.extract_text().split())
        for found in PdfReader(demo_report / "report.pdf").pages
    ]
    expected = [f"(demo: {name})" for name, of in texts.items() if not of["folded"]]
    assert all(sum(text in page for page in said) == 1 for text in expected)
    counts = [sum(text in page for text in expected) for page in said]
    assert counts[0] >= 1, "a picture is beside the answers"
    assert max(counts) == 2 and len(said) <= 2 + len(expected) / 2 + 2
    (figures / "demo/data_stall_share.pdf").unlink()
    with pytest.raises(UserError, match=r"data_stall_share\.pdf[\s\S]*snakemake -f"):
        pdf.write([part], figures, tmp_path / "report.pdf")


@pytest.mark.parametrize("listed", [0, 4])
def test_an_experiment_without_any_data_has_its_page(tmp_path, listed):
    runs = [logs.settings(a) for a in logs.APPROACHES[:listed]]
    logs.ingested(tmp_path, runs, to="tables/demo")
    part = summary.experiment("demo", tmp_path / "tables")
    page.write([part], tmp_path / "figures", tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "This figure has not been made" in text
    assert "no pair of runs to compare" in text
    assert text.count("missing") >= listed
    pdf.write([part | {"figures": []}], tmp_path / "figures", tmp_path / "report.pdf")
