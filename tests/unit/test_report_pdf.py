"""Tables on pages of a PDF: nothing over the edge, nothing lost, the head on every page."""

import io
import itertools

import pytest
from pypdf import PdfReader

from tokenscale.report import pdf
from tokenscale.report.pdf import GAP, HEIGHT, MARGIN, ROOM, SIZE, column_widths, text_width, wrap
from tokenscale.report.table import Table

CELLS = ["loss or gradient not finite " * 4, *["1 234 (1 200–1 260)"] * 9]
COLUMNS = [("run", False), ("reasons", False), *((f"number {i}", True) for i in range(9))]
WIDE = Table(COLUMNS, [[f"run-{i:03d}", *CELLS] for i in range(120)], "A caption. " * 40)


def test_columns_fit_the_page():
    assert sum(column_widths(WIDE, ROOM)) + GAP * (len(WIDE.columns) - 1) <= ROOM + 1e-6
    narrow = Table([("a", False), ("b", True)], [["x", "1"]])
    assert sum(column_widths(narrow, ROOM)) < 30
    row = [
        "a sentence of a claim " * 2,
        "1.7 against 2.8 GB",
        "what the data say of it, at length " * 12,
        "supported",
    ]
    claim, figure, text, verdict = column_widths(
        Table([(name, False) for name in "abcd"], [row]), ROOM
    )
    assert text > 2 * claim > 2 * figure > verdict and text > ROOM / 2, "most room for most text"


@pytest.mark.parametrize(
    "text", ["a few words in a row", "pretokenized-padded-llama-tiny-ddp-w2-0123", "x" * 90, ""]
)
@pytest.mark.parametrize("width", [18.0, 60.0, 500.0])
def test_lines_are_no_wider_than_asked_and_lose_nothing(text, width):
    lines = wrap(text, width, SIZE)
    assert all(text_width(line, SIZE) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_the_width_of_letters_is_that_of_the_drawing():
    figure = pdf.Figure(figsize=(8, 2), dpi=72)
    drawn = figure.text(0, 0.5, "useful tokens / s", fontsize=40, fontfamily="DejaVu Sans")
    assert drawn.get_window_extent().width == pytest.approx(
        text_width("useful tokens / s", 40), rel=0.03
    )


def test_every_row_is_on_a_page_below_its_head_and_above_the_margin():
    writer = pdf.PageWriter("demo")
    writer.heading("Runs")
    writer.table(WIDE)
    said = [[text.get_text() for text in page.texts] for page in writer.figures]
    assert len(said) > 2 and all(page[0] == "demo" and "run" in page for page in said)
    joined = " ".join(" ".join(page) for page in said)
    assert all(f"run-{i:03d}" in joined for i in range(120))
    lowest = min(text.get_position()[1] for page in writer.figures for text in page.texts)
    assert lowest * HEIGHT >= MARGIN - 0.1


def one_page(width, height):
    """A PDF drawing of this size in points."""
    with io.BytesIO() as buffer:
        pdf.Figure(figsize=(width / 72, height / 72)).savefig(buffer, format="pdf")
        return buffer.getvalue()


@pytest.mark.parametrize("height", [200, 300, 420, 560])
def test_two_figures_fit_a_page_and_none_leaves_it(height):
    writer = pdf.PageWriter("demo")
    drawing = one_page(576, height)
    for n in range(6):
        writer.drawing(
            drawing, f"A finding with its number {n}", "A caption of several words. " * 10
        )
    counts = [len(placed) for placed in writer.drawings]
    assert sum(counts) == 6 and min(counts) >= (2 if height < 500 else 1)
    for page, drawings in zip(writer.figures, writer.drawings, strict=True):
        lowest = min(text.get_position()[1] for text in page.texts) * HEIGHT
        assert lowest >= MARGIN - 1
        ends = [(y, y + scale * height) for _, scale, _, y in drawings]
        assert all(above[0] > below[1] for above, below in itertools.pairwise(ends))
        assert all(x >= MARGIN - 1 and scale * 576 <= ROOM + 1 for _, scale, x, _ in drawings)


def test_letters_that_the_fonts_lack_are_counted_with_their_page():
    pages = pdf.PageWriter("t")
    pages.paragraph("Źródło, Ελλάδα, Привет")
    whole = "".join(page.extract_text() for page in PdfReader(io.BytesIO(pages.to_pdf())).pages)
    assert "missing" not in whole
    pages = pdf.PageWriter("t")
    pages.paragraph("数据 and 🚀")
    said = "".join(page.extract_text() for page in PdfReader(io.BytesIO(pages.to_pdf())).pages)
    assert "3 characters of this document are missing" in " ".join(said.split())
    assert "on page 1" in " ".join(said.split())
