"""Tables on pages of a PDF: nothing over the edge, nothing lost, the head on every page."""

import pytest

from tokenscale.report import pdf_pages
from tokenscale.report.pdf_pages import GAP, MARGIN, SIZE, WIDTH, columns, length, wrap
from tokenscale.report.table import Table

ROOM = 72 * (WIDTH - 2 * MARGIN)
CELLS = ["loss or gradient not finite " * 4, *["1 234 (1 200–1 260)"] * 9]
COLUMNS = [("run", False), ("reasons", False), *((f"number {i}", True) for i in range(9))]
WIDE = Table(COLUMNS, [[f"run-{i:03d}", *CELLS] for i in range(120)], "A caption. " * 40)


def texts(figure):
    return [text.get_text() for text in figure.texts]


def test_columns_fit_the_page():
    assert sum(columns(WIDE, ROOM)) + GAP * (len(WIDE.columns) - 1) <= ROOM + 1e-6
    narrow = Table([("a", False), ("b", True)], [["x", "1"]])
    assert sum(columns(narrow, ROOM)) < 30


@pytest.mark.parametrize(
    "text", ["a few words in a row", "pretokenized-padded-llama-tiny-ddp-w2-0123456789", "x" * 90, ""]
)
@pytest.mark.parametrize("width", [18.0, 60.0, 500.0])
def test_lines_are_no_wider_than_asked_and_lose_nothing(text, width):
    lines = wrap(text, width, SIZE)
    assert all(length(line, SIZE) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_the_width_of_letters_is_that_of_the_drawing():
    figure = pdf_pages.Figure(figsize=(8, 2), dpi=72)
    drawn = figure.text(0, 0.5, "useful tokens / s", fontsize=40, fontfamily="DejaVu Sans")
    assert drawn.get_window_extent().width == pytest.approx(length("useful tokens / s", 40), rel=0.03)


def test_every_row_is_on_a_page_below_its_head():
    pages = pdf_pages.tables("demo", [("Runs", WIDE), ("Nothing", Table([("a", False)], []))])
    assert len(pages) > 2
    said = [texts(page) for page in pages]
    assert all(page[0] == "demo" and "run" in page for page in said)
    joined = " ".join(" ".join(page) for page in said)
    assert all(f"run-{i:03d}" in joined for i in range(120))
    assert "Nothing" not in joined


def test_nothing_is_below_the_margin():
    for page in pdf_pages.tables("demo", [("Runs", WIDE)]):
        assert min(text.get_position()[1] for text in page.texts) * pdf_pages.HEIGHT >= MARGIN - 0.1
