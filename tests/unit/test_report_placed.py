"""A page on a page: both are read, the drawing where it was put, and equal ones give equal bytes."""

import io

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from pypdf import PdfReader

from tokenscale.report.pdf_placed import placed


def page(text, fonttype):
    figure = Figure(figsize=(4, 2))
    figure.text(0.5, 0.5, text)
    with rc_context({"pdf.fonttype": fonttype}), io.BytesIO() as buffer:
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
        return buffer.getvalue()


@pytest.fixture(scope="module")
def pages():
    """A drawing and a page of words; the narrow space and the arrow are outside Latin-1."""
    return page("drawn 75\u202f100 →", 42), page("words 75\u202f100 →", 3)


def test_the_words_of_both_are_found(pages):
    found = PdfReader(io.BytesIO(placed(*pages, (0.5, 0, 0, 0.5, 10, 20)))).pages
    said = found[0].extract_text()
    assert len(found) == 1 and "words" in said and "drawn" in said


def test_the_drawing_stands_where_it_was_put(pages):
    (found,) = PdfReader(io.BytesIO(placed(*pages, (0.5, 0, 0, 0.5, 10, 20)))).pages
    assert found.get_contents().get_data().endswith(b"q 0.5000 0.0000 0.0000 0.5000 10.0000 20.0000 cm /Figure Do Q")
    form = found["/Resources"]["/XObject"]["/Figure"]
    drawing = PdfReader(io.BytesIO(pages[0])).pages[0]
    assert form["/BBox"] == drawing.mediabox
    assert form.get_data() == drawing.get_contents().get_data()


def test_images_and_forms_of_the_page_stay(pages):
    figure = Figure(figsize=(4, 2))
    figure.figimage([[0.0, 1.0], [1.0, 0.0]])
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="pdf")
        image = buffer.getvalue()
    before = PdfReader(io.BytesIO(image)).pages[0]["/Resources"]["/XObject"]
    (found,) = PdfReader(io.BytesIO(placed(pages[0], image, (1, 0, 0, 1, 0, 0)))).pages
    assert before and set(found["/Resources"]["/XObject"]) == {*before, "/Figure"}


def test_equal_pages_give_equal_bytes(pages):
    assert placed(*pages, (1, 0, 0, 1, 0, 0)) == placed(*pages, (1, 0, 0, 1, 0, 0))
