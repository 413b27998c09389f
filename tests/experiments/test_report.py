"""The page and the PDF: self-contained, escaped, honest about few runs, rebuilt with equal bytes."""

import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pypdf import PdfReader

from tests import logs
from tokenscale.analysis import queries
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import connect, query
from tokenscale.report import answers, campaign_quality, page, paired_comparisons, pdf, save, summary
from tokenscale.report.captions import OVERSUBSCRIBED, SHARED_CORES
from tokenscale.report.figure import figure_class
from tokenscale.settings.closure import import_closure
from tokenscale.settings.data import StorageSettings
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(60)]

#: what `queries.connect` itself reads
VIEWS = {"steps_global", "validation"}
EVIL = "<script>alert('x')</script> & \"co\""


def build(folder, drawn=True, bench=True, **options):
    """Tables and figures below `folder/results`; the page's text."""
    table = logs.write_demo(folder, **options)
    ingest(table, folder / "runs", folder / "tables" / "demo", [folder / "bench.json"] if bench else [])
    for name in FIGURES if drawn else ():
        save.save(name, folder / "tables" / "demo", folder / "figures" / "demo" / name)
    page.write(["demo"], folder / "tables", folder / "figures", folder / "index.html")
    return (folder / "index.html").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    return folder, build(folder, question=EVIL, note=EVIL)


@pytest.fixture(scope="module")
def asked_for_whole():
    """The queries that the PDF asks."""
    return set()


@pytest.fixture(scope="module")
def whole(site, asked_for_whole):
    """The report as PDF, every figure drawn for it."""
    path, sql = site[0] / "a.pdf", queries.sql
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "sql", lambda name: asked_for_whole.add(name) or sql(name))
        summary._experiment.cache_clear()
        pdf.write(["demo"], site[0] / "tables", path)
    return path


def compared_answers(part):
    """Answers that are comparisons of cells."""
    words = paired_comparisons.VERDICT_WORDS
    return [answer for answer in part["answers"] if answer["verdict"].split(",")[0] in words]


class Reader(HTMLParser):
    """Collects tags, references, ids and visible text; fails on what a page of ours must not have."""

    def __init__(self, text):
        super().__init__()
        self.tag, self.open, self.wide, self.drawings = "", [], [], []
        self.tags, self.references, self.ids, self.text = [], [], [], []
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


def test_the_page_refers_to_nothing_outside(site):
    read = Reader(site[1])
    assert read.references
    for reference in read.references:  # to places of the page, or to files of its own folder
        assert reference[0] == "#" or reference.split("/")[0] in ("figures", "data", "sql") and ".." not in reference
    assert not {"script", "link", "iframe"} & {*read.tags} and "<script" not in site[1]
    assert EVIL in "".join(read.text), "what users write is text"
    assert len(read.ids) == len(set(read.ids))
    used = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', site[1])
    assert {name for pair in used for name in pair if name} <= set(read.ids)
    assert not re.search(r"url\((?!#)|@import", site[1])
    assert "default-src 'none'" in site[1]


def test_tables_scroll_and_every_drawing_has_one_for_a_phone(site):
    """Letters of the drawing for a phone are at least as large on 340 px as on the drawing itself: 9 points or more."""
    reader = Reader(site[1])
    assert reader.wide == []
    assert all(drawing["aria-hidden"] == "true" for drawing in reader.drawings), "the text beside it is read"
    wide, phone = ([d for d in reader.drawings if d["class"] == which] for which in ("wide", "phone"))
    assert len(wide) == len(phone) == len(reader.drawings) / 2 > 10
    for drawing in phone:
        _, _, width, height = map(float, drawing["viewbox"].split())
        assert width <= 340 and 100 < height < 3000
    panels = [float(d["viewbox"].split()[3]) for d in (*wide, *phone)]
    assert max(panels[len(wide) :]) > 1.5 * max(panels[: len(wide)]), "panels are below one another"
    drawn = [json.loads((site[0] / f"figures/demo/{name}.json").read_text()) for name in FIGURES]
    alts = [texts["alt"] for texts in drawn if not texts["folded"]]
    assert all(f'role="img" aria-label="{html.escape(alt[:20])}' in site[1] for alt in alts)


def visible_words(text):
    """Words of a page, also the folded ones, without those of drawings."""
    text = re.sub(r"(?s)<(style|svg|title)\b.*?</\1>|<[^>]+>", " ", text)
    return html.unescape(text).split()


def test_a_page_is_short_and_says_each_caution_once(site):
    assert len(visible_words(site[1])) <= 9000
    text = " ".join(visible_words(site[1]))
    part = summary.experiment("demo", site[0] / "tables")
    for caution in (*summary.list_cautions(part), *page._figures(part, site[0] / "figures")["methods"]):
        assert text.count(caution.rstrip(".").removesuffix(" (world sizes above one)")) == 1, caution


def test_few_figures_are_open_and_each_is_somewhere(site):
    part = page._figures(summary.experiment("demo", site[0] / "tables"), site[0] / "figures")
    names = [f["name"] for f in (part["picture"], *part["drawn"], *part["more"], *part["empty"])]
    assert sorted(names) == sorted(FIGURES) and 1 + len(part["drawn"]) == page.OPEN and part["more"]
    drawn = site[1][site[1].index('id="demo-figure-parallel_methods"') :]
    assert "memory per device (MB)" in drawn[: drawn.index("<details>")], "its table is read without opening anything"


def test_every_verdict_is_of_one_kind():
    known = [word for words in page.KINDS.values() for word in words]
    assert sorted(known) == sorted({*answers.WORDS, *paired_comparisons.VERDICT_WORDS})
    assert page._kinds(["faster, with drift", "counted", "one run each, unequal updates", "faster"]) == {
        "exact": ["counted"], "tested on pairs of runs": ["faster"], "described, not tested": ["one run each"],
    }  # fmt: skip


def test_the_design_says_what_is_not_run_and_why(tmp_path):
    left_out = [{"cells": {"layout": {"data": 2}, "approach": "padded"}, "reason": EVIL}]
    text = build(tmp_path, drawn=False, world_sizes=(1,), repeats=1, left_out=left_out)
    assert f"Not run: approach=padded, layout.data=2 ({EVIL})." in "".join(Reader(text).text)


def primary(of, over, **fields):
    """A primary comparison of two approaches on one rank, as the run table has it."""
    names = [f"approach={of}", f"approach={over}"]
    cells = [f"{name}, layout.data=1" for name in names]
    return {
        "of": cells[0], "over": cells[1], "names": names, "at": "layout.data=1", "factor": "approach",
        "quantity": "useful_tokens_per_s", **fields,
    }  # fmt: skip


@pytest.mark.parametrize(("repeats", "verdict"), [(6, "faster, with drift"), (5, "too few runs")])
def test_only_primary_comparisons_are_tested_and_answer(tmp_path, repeats, verdict):
    chosen = [primary("packed", "padded")]
    build(tmp_path, drawn=False, world_sizes=(1,), repeats=repeats, primary=chosen)
    part = summary.experiment("demo", tmp_path / "tables")
    (answer,) = compared_answers(part)
    assert answer["verdict"] == verdict and answer["text"].startswith("1 data-parallel rank: packed trains on ")
    rows = [dict(zip([name for name, _ in part["comparisons"].columns], row, strict=True))
            for row in part["comparisons"].rows]  # fmt: skip
    assert [row["verdict"] for row in rows] == [verdict, *["exploratory"] * 3]
    assert float(rows[0]["smallest possible p"]) == pytest.approx(2 / 2**repeats, rel=0.1), "a family of one"
    assert {row["p (Holm)"] for row in rows[1:]} == {"–"}


def test_losses_are_compared_in_words_of_losses(tmp_path):
    chosen = [primary("packed", "padded", quantity="validation_loss")]
    build(tmp_path, drawn=False, world_sizes=(1,), repeats=6, primary=chosen)
    part = summary.experiment("demo", tmp_path / "tables")
    (answer,) = compared_answers(part)
    assert "the validation loss of padded" in answer["text"] and answer["part"] == "loss"
    assert answer["verdict"].startswith(("higher loss", "lower loss", "equivalent", "no difference"))
    assert len(part["comparisons"].rows) == 5, "speeds of the same cells stay as an exploratory comparison"


def proof_of(runs, tmp_path, edit, approach="token-list"):
    """The two parts of the proof, after the first file of `approach` has been edited."""
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    first = min((tmp_path / "runs").glob(f"{approach}-*"))
    logs.edit(first, lambda line: line | (edit(line) if line["step"] == 4 else {}), rank="00000")
    logs.ingested(tmp_path, runs, to="demo")
    return summary.experiment("demo", tmp_path)["proof"]["parts"]


TWINS = [logs.settings(a, repeat=r) for a in ("padding-free", "token-list") for r in range(2)]
WORLDS = [logs.settings("packed", w) for w in (1, 2)]


@pytest.mark.parametrize(
    ("runs", "edit", "kind", "state", "said"),
    [
        (TWINS, lambda line: {}, 1, "proven",
         "All 2 pairs have the same samples, the same useful tokens, and bit-identical losses"),
        (TWINS, lambda line: {"loss_sum": line["loss_sum"] * (1 + 1e-15)}, 1, "broken",
         "1 pair: same order, losses differ: not proven"),
        (TWINS, lambda line: {"order_digest": line["order_digest"] ^ 1}, 1, "broken",
         "other samples or another order: not proven"),
        # of 7,946 useful tokens together, nats a token
        (WORLDS, lambda line: {"loss_sum": line["loss_sum"] + 0.1}, 0, "proven", f"differ by up to {0.1 / 7946:.2g}"),
        (WORLDS, lambda line: {"loss_sum": line["loss_sum"] + 1}, 0, "broken", f"differ by up to {1 / 7946:.2g}"),
    ],
)  # fmt: skip
def test_equal_data_are_proven_by_samples_and_losses(tmp_path, runs, edit, kind, state, said):
    part = proof_of(runs, tmp_path, edit, "token-list" if runs is TWINS else "packed-*-w2")[kind]
    assert part["state"] == state and said in part["text"]


def test_other_useful_tokens_are_other_data(site):
    assert "Same data across world sizes: proven. All 15 pairs" in site[1]
    order = query("order", site[0] / "tables/demo").assign(same_useful_tokens=False)
    part, _ = campaign_quality.proof(order)["parts"]
    assert part["state"] == "broken" and "useful tokens differ: not proven" in part["text"]


def test_two_storages_of_one_approach_are_two_comparisons(tmp_path):
    stored = [StorageSettings(dtype=d) for d in ("int32", "int64")]
    runs = [logs.settings("padding-free", repeat=r) for r in range(3)]
    runs += [logs.settings("token-list", repeat=r, storage=storage) for storage in stored for r in range(3)]
    logs.made(tmp_path, runs, further=("storage.dtype",))
    assert [row[:4] for row in summary.experiment("tables", tmp_path)["comparisons"].rows] == [
        ["token-list", "padding-free", f"storage.dtype={d}", "3"] for d in ("int32", "int64")
    ]


GPU = {"device": "A test GPU", "device_kind": "cuda"}


@pytest.mark.parametrize(
    ("threads", "device", "said"),
    [((2, 2), {}, OVERSUBSCRIBED), ((2, 1), {}, SHARED_CORES), ((1, 1), {}, None), ((2, 1), GPU, None),
     ((2, 2), GPU, None), ((2, 1), GPU | {"device_kind": None}, None)],
)  # fmt: skip
def test_page_cover_and_figures_say_alike_that_cores_are_shared(tmp_path, threads, device, said):
    runs = [logs.settings(world_size=w) for w in (1, 2)]
    of = {run.identity: logs.HARDWARE | device | {"threads_per_rank": n} for run, n in zip(runs, threads, strict=True)}
    logs.made(tmp_path, runs, to="tables/demo", hardware=lambda run: of[run.identity])
    page.write(["demo"], tmp_path / "tables", tmp_path / "figures", tmp_path / "index.html")
    part = summary.experiment("demo", tmp_path / "tables")
    assert part["caution"] == (said or "")
    texts = [(tmp_path / "index.html").read_text(), " ".join(text.get_text() for text in front([part]).texts)]
    with connect(tmp_path / "tables" / "demo") as connection:
        for name in ("scaling_throughput", "training_time", "step_time_breakdown"):
            kind = figure_class(name)
            figure = kind(*(queries.query(name, connection) for name in kind.queries))
            drawn = [text.get_text() for text in figure.draw().findobj(lambda artist: hasattr(artist, "get_text"))]
            assert [text for text in drawn if text in (OVERSUBSCRIBED, SHARED_CORES)] == ([said] if said else []), name
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
    text = f"a_factor=a level with a long name: packed-{number} trains on {number} × as many useful tokens"
    spread = "1–1, 6 pairs, order-statistic"
    return {"text": f"{text} a second as padded", "spread": spread, "verdict": verdict, "figure": ""}


def test_of_many_answers_those_that_are_decided_are_told_and_the_others_counted():
    few, decided = [answer(n) for n in range(4)], [answer(n, "faster") for n in range(5)]
    told = [paired_comparisons.select_answers(of, 3) for of in (few[:3], few, few[:3] + decided[:2], few + decided)]
    assert [of for of, _ in told] == [few[:3], [], decided[:2], decided[:3]]
    assert ["too few runs" in more for _, more in told] == [False, True, True, False] and "6 more" in told[3][1]


def test_an_experiment_with_many_answers_fills_neither_the_first_page_nor_the_cover(tmp_path):
    for name in ("demo", "second"):
        logs.demo(tmp_path / name, to=tmp_path / "tables" / name, world_sizes=(1,))
    part = summary.experiment("demo", tmp_path / "tables")
    part |= {"answers": [answer(n, "faster") for n in range(40)], "note": "A word of the note. " * 60}
    part["question"] = "Which of the many ways from text to rows trains fastest, and does that depend on the rows? " * 3
    other = summary.experiment("second", tmp_path / "tables") | {"text": "corpus other, tokenizer other"}
    of_pages = [found | {"href": f"{found['name']}.html"} for found in (part, other)]
    said = page.render(of_pages, "x", [])
    assert said.count("as many useful tokens") < 10 and "37 more answers" in said
    assert f"<dt>text, all others</dt><dd>{part['text']}" in said and "<dt>text</dt><dd>corpus other" in said
    assert page.render(of_pages[:1], "x", []).count("as many useful tokens") >= 40
    cover = front([part])
    lines = " ".join(text.get_text() for text in cover.texts)
    edges = [text.get_window_extent(FigureCanvasAgg(cover).get_renderer()) for text in cover.texts]
    assert min(edge.y0 for edge in edges) > 0 and max(edge.x1 for edge in edges) < cover.bbox.x1 - 20
    assert "This is demo scale" in lines and "32 more answers: see its chapter." in lines


def test_a_stopped_run_is_on_the_page_and_in_no_number(tmp_path):
    runs = [logs.settings(a, repeat=r) for a in ("padded", "packed") for r in range(3)]
    bad = logs.settings("packed", repeat=1)
    logs.made(tmp_path, runs, to="tables/demo", attempts=lambda run: [{"diverges": 8}] if run == bad else None)
    part = summary.experiment("demo", tmp_path / "tables")
    assert part["validity"] == {"valid": 5, "suspect": 0, "invalid": 1, "missing": 0}
    assert part["design"].rows[0][1:] == ["valid", "nonfinite", "valid", "2 of 3"]
    (row,) = [row for row in part["inventory"].rows if row[2] == "nonfinite"]
    assert row[1] == "invalid"
    assert "training stopped: loss or gradient not finite at step 8 of 12" in row[3]
    assert [row[2] for row in part["throughput"].rows] == ["3", "2"]
    assert [row[2] for row in part["comparisons"].rows] == ["2"]
    assert "Left out: 1 invalid run of 6." in part["throughput"].caption
    page.write(["demo"], tmp_path / "tables", tmp_path / "figures", tmp_path / "index.html")
    assert '<span class="badge nonfinite">nonfinite</span>' in (tmp_path / "index.html").read_text()


def test_modules_name_the_queries_and_files_that_they_use(site, whole, asked_for_whole, tmp_path, monkeypatch):
    folder = site[0]
    asked, opened = set(), set()
    sql, read = queries.sql, page._read
    monkeypatch.setattr(queries, "sql", lambda name: asked.add(name) or sql(name))
    monkeypatch.setattr(page, "_read", lambda name: opened.add(name) or read(name))
    summary._experiment.cache_clear()
    summary.experiment("demo", folder / "tables")
    assert asked == set(summary.QUERIES) | VIEWS
    asked.clear()
    (tmp_path / "claims.json").write_text('{"claims": [], "replication": []}')
    where = {"claims": tmp_path / "claims.json"}
    page.write(["demo"], folder / "tables", folder / "figures", tmp_path / "index.html", **where)
    assert asked == set(), "the page only links the definitions"
    assert opened == set(page.FILES)
    assert all((Path(page.__file__).parent / name).is_file() for name in opened)
    drawn = {name for figure in FIGURES for name in figure_class(figure).queries}
    for figure, module in FIGURES.items():  # the code of a figure is found by what its class names
        kind = figure_class(figure)
        assert kind.__module__ == module
        assert set(kind.queries) <= {Path(file).stem for file in import_closure(module)}
    assert asked_for_whole == set(summary.QUERIES) | drawn | VIEWS


def test_the_page_is_rebuilt_with_equal_bytes_and_the_pdf_has_a_page_of_every_figure(site, whole):
    folder, text = site
    page.write(["demo"], folder / "tables", folder / "figures", folder / "again.html")
    assert (folder / "again.html").read_text() == text
    assert whole.read_bytes().startswith(b"%PDF")
    pages = PdfReader(whole).pages
    drawn = {name: json.loads((folder / f"figures/demo/{name}.json").read_text()) for name in FIGURES}
    said = [" ".join(found.extract_text().split()) for found in pages]
    expected = [f"(demo: {name})" for name, texts in drawn.items() if not texts["folded"]]
    assert all(sum(text in page for page in said) == 1 for text in expected)
    counts = [sum(text in page for text in expected) for page in said]
    assert counts[0] >= 1, "a picture is beside the answers"
    assert max(counts) == 2 and len(pages) <= 2 + len(expected) / 2 + 2


def test_a_drawn_figure_is_taken_where_it_is_of_the_same_data_and_drawn_again_elsewhere(site, whole, monkeypatch):
    folder, drawn, draw = site[0], [], save.draw
    figures = folder / "figures/demo"
    monkeypatch.setattr(save, "draw", lambda made, *rest, **o: drawn.append(made.name) or draw(made, *rest, **o))
    pdf.write(["demo"], folder / "tables", folder / "taken.pdf", figures=folder / "figures")
    assert drawn == []
    assert (folder / "taken.pdf").read_bytes() == whole.read_bytes()
    names = ("loss_over_time.csv", "padding_share.pdf", "data_stall_share.pdf")
    kept = {name: (figures / name).read_bytes() for name in names}
    try:
        (figures / "loss_over_time.csv").write_bytes(kept["loss_over_time.csv"] + b"0\n")  # of other data
        (figures / "padding_share.pdf").write_bytes(kept["padding_share.pdf"][:2000])
        (figures / "data_stall_share.pdf").unlink()
        pdf.write(["demo"], folder / "tables", folder / "taken.pdf", figures=folder / "figures")
    finally:
        for name, content in kept.items():
            (figures / name).write_bytes(content)
    assert sorted(drawn) == sorted(name[:-4] for name in kept)
    assert (folder / "taken.pdf").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("listed", [0, 4])
def test_an_experiment_without_any_data_has_its_page(tmp_path, listed):
    runs = [logs.settings(a) for a in logs.APPROACHES[:listed]]
    logs.ingested(tmp_path, runs, to="tables/demo")
    page.write(["demo"], tmp_path / "tables", tmp_path / "figures", tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "This figure has not been made" in text
    assert "no pair of runs to compare" in text
    assert text.count("missing") >= listed
    pdf.write(["demo"], tmp_path / "tables", tmp_path / "report.pdf")
