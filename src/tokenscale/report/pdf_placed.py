"""A page of a PDF on a page of another: a drawing is shown as it is, and neither laid out nor drawn once more."""

import io

from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, IndirectObject, NameObject


def placed(drawing: bytes, document: bytes, matrix: tuple[float, ...]) -> bytes:
    """A document of one page, which shows the page of another, too.

    `matrix` takes the drawing's points to those of the page, as the operator `cm` has it (PDF 32000-1, 8.3.4).
    """
    writer = PdfWriter(clone_from=io.BytesIO(document))
    shown, shows = PdfReader(io.BytesIO(drawing)).pages[0], writer.pages[0]
    form = DecodedStreamObject()
    form.set_data(shown.get_contents().get_data())
    form.update({NameObject("/Type"): NameObject("/XObject"), NameObject("/Subtype"): NameObject("/Form")})
    for key, name in (("/MediaBox", "/BBox"), ("/Resources", "/Resources")):
        form[NameObject(name)] = shown.raw_get(key).clone(writer)
    content = DecodedStreamObject()
    numbers = " ".join(f"{number:.4f}" for number in matrix)
    content.set_data(shows.get_contents().get_data() + f"\nq {numbers} cm /Figure Do Q".encode())
    resources = shows["/Resources"]
    before = resources["/XObject"] if "/XObject" in resources else {}  # images, and letters that are forms
    forms = DictionaryObject(before)
    forms[NameObject("/Figure")] = _object(form, writer)
    resources[NameObject("/XObject")] = forms
    shows[NameObject("/Contents")] = _object(content, writer)
    with io.BytesIO() as buffer:
        writer.write(buffer)
        return buffer.getvalue()


def _object(stream: DecodedStreamObject, writer: PdfWriter) -> IndirectObject:
    """A new stream as an object of the writer's."""
    packed = stream.flate_encode()
    packed.indirect_reference = None  # it is to have one
    return packed.clone(writer).indirect_reference
