"""The report as a PDF: claims, and for each experiment a cover, one page per figure, and tables.

All text is written as one document. The drawing of each figure, a PDF of its own, is then placed on its page.
"""

import io
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from pypdf import PageObject, PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, StreamObject

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, sha256_file
from tokenscale.report import figure_metadata, paired_comparisons, pdf_pages, save, summary
from tokenscale.report.claims import claims_table, count_verdicts, read_claims
from tokenscale.report.pdf_pages import HEIGHT, MARGIN, WIDTH
from tokenscale.report.style import style
from tokenscale.report.table import Table
from tokenscale.report.views import VIEWS
from tokenscale.settings.registry import FIGURES

#: tables of `summary.experiment` → their headings, in this order; before and after the figures
BEFORE = {"design": "Design"}
AFTER = {
    "throughput": "Throughput",
    "comparisons": "Offline against online",
    "validation": "Validation loss",
    "generations": "Generated texts",
    "steadiness": "Quality of the measurements",
    "power": "How many runs it takes",
    "rules": "Twelve rules of scientific benchmarking (after Hoefler and Belli, SC 2015)",
    "items": "What conferences ask of experiments",
    "inventory": "Run inventory",
}
#: so many answers stand on an experiment's first page
ANSWERS = 8
#: where the last line of an experiment's first page may end (a share of the page); one more line fits below it
LOWEST = 0.06
#: width of a letter of running text, in sizes of the font
_LETTER = {"normal": 0.54, "bold": 0.65}
_METADATA = {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None}


@dataclass(frozen=True)
class Page:
    """A page of text, and the drawing that is placed on it: its PDF, its scale, and its lower edge in inches."""

    text: Figure
    drawing: bytes = b""
    scale: float = 1.0
    bottom: float = 0.0


def write(
    experiments: list[str],
    tables: Path,
    output: Path,
    *,
    claims: Path | None = None,
    view: str | None = None,
    figures: Path | None = None,
) -> None:
    """Draw all pages from the tables; equal tables give equal bytes.

    `claims` is what the command `claims` wrote. A `view` (see `views.py`) has its claims and figures alone. `figures`
    is the folder of figures drawn before: one whose metadata match the tables and the code is not drawn again.
    """
    pages: list[Page] = []
    outline: list[tuple[str, int, bool]] = []
    for chapter, parts in _chapters(experiments, tables, claims, view, figures):
        for title, part in parts:
            outline.append((title or chapter, len(pages), not title))
            pages += part
    writer = PdfWriter(clone_from=io.BytesIO(_text_pages(page.text for page in pages)))
    for number, page in enumerate(pages):
        if page.drawing:
            _place(writer, writer.pages[number], page)
    parent: Any = None
    for title, number, begins_chapter in outline:
        item = writer.add_outline_item(title=title, page_number=number, parent=None if begins_chapter else parent)
        parent = item if begins_chapter else parent
    title = VIEWS[view].title if view else "tokenscale report"
    metadata = of_report(experiments, tables, claims, view)
    writer.metadata = {"/Title": title, "/Subject": figure_metadata.text(metadata)}
    with atomic(output) as temporary, open(temporary, "wb") as file:
        writer.write(file)


def of_report(experiments: list[str], tables: Path, claims: Path | None, view: str | None) -> figure_metadata.Metadata:
    """Return the provenance metadata of the whole document."""
    return {
        "passport": figure_metadata.VERSION,
        "report": {name: figure_metadata.digest(tables / name) for name in experiments},
        "order": experiments,
        "claims": sha256_file(claims) if claims else None,
        "view": view,
        "code": figure_metadata.code("tokenscale.report.pdf", *FIGURES.values()),
        "libraries": figure_metadata.libraries(),
    }


def _text_pages(figures: Iterable[Figure]) -> bytes:
    """Return the pages as one PDF."""
    with style(), io.BytesIO() as buffer:
        with PdfPages(buffer, metadata=_METADATA) as pages:
            for figure in figures:
                pages.savefig(figure)
        return buffer.getvalue()


def _place(writer: PdfWriter, shows: PageObject, page: Page) -> None:
    """Add the drawing to its page as a form (PDF 32000-1, 8.10), so that it keeps its own fonts and names."""
    shown = PdfReader(io.BytesIO(page.drawing)).pages[0]
    form = DecodedStreamObject()
    form.set_data(shown.get_contents().get_data())
    form.update({NameObject("/Type"): NameObject("/XObject"), NameObject("/Subtype"): NameObject("/Form")})
    for key, name in (("/MediaBox", "/BBox"), ("/Resources", "/Resources")):
        form[NameObject(name)] = shown.raw_get(key).clone(writer)
    matrix = (page.scale, 0, 0, page.scale, 72 * MARGIN, 72 * page.bottom)
    numbers = " ".join(f"{number:.4f}" for number in matrix)
    content = DecodedStreamObject()
    content.set_data(shows.get_contents().get_data() + f"\nq {numbers} cm /Figure Do Q".encode())
    shared: Any = shows["/Resources"]  # matplotlib's pages share one dictionary
    resources = DictionaryObject(shared)
    forms = DictionaryObject(resources.get("/XObject", {}))
    forms[NameObject("/Figure")] = _add(writer, form)
    resources[NameObject("/XObject")] = forms
    shows[NameObject("/Resources")] = resources
    shows[NameObject("/Contents")] = _add(writer, content)


def _add(writer: PdfWriter, stream: StreamObject) -> Any:
    """Add a new stream to the document, compressed; return the reference to it."""
    return writer._add_object(stream.flate_encode())


def _chapters(
    experiments: list[str], tables: Path, claims: Path | None, view: str | None, figures: Path | None
) -> Iterator[tuple[str, Iterable[tuple[str, list[Page]]]]]:
    """Yield (title, its parts) of the claims and of each experiment. The first part of a chapter has no title."""
    only = VIEWS[view].claims if view else None
    if claims is not None:
        rows = [row for row in read_claims(claims) if only is None or row["id"] in only]
        yield "Claims", [("", [Page(figure) for figure in _claims(rows)])]
    for name in experiments:
        yield name, _parts(name, tables, view, figures)


def _claims(rows: list[dict[str, Any]]) -> list[Figure]:
    pages = pdf_pages.PageWriter("tokenscale: claims")
    pages.heading("Claims", 17)
    pages.paragraph(", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(rows).items()) + ".", 10)
    for document, where in dict.fromkeys((row["document"], row["where"]) for row in rows):
        pages.heading(document, 11)
        if where:
            pages.paragraph(where)
        pages.table(claims_table(rows, document))
    return pages.figures


def _parts(name: str, tables: Path, view: str | None, figures: Path | None) -> Iterator[tuple[str, list[Page]]]:
    """Yield (title, pages) of an experiment: cover and design, one part per figure, tables."""
    part = summary.experiment(name, tables)
    shown = [figure for figure in part["figures"] if view is None or figure in VIEWS[view].figures]
    if view is not None and not shown:
        return
    whole = view is None
    before = pdf_pages.tables(name, _sections(part, BEFORE)) if whole else []
    yield "", [Page(cover(part)), *map(Page, before)]
    with save.Tables(tables / name) as opened:
        for figure in shown:
            loaded = save.load_figure(figure, opened)
            drawing = _drawn(loaded, figures / name) if figures else None
            yield loaded.figure.title, [figure_page(loaded, drawing or save.draw(loaded, kinds=("pdf",))["pdf"])]
    after = pdf_pages.tables(name, _sections(part, AFTER)) if whole else []
    if after:
        yield "Tables", [*map(Page, after)]


def _drawn(loaded: save.LoadedFigure, folder: Path) -> bytes | None:
    """Return the figure's PDF from the folder, if it was drawn from the same data by the same code."""
    path = folder / f"{loaded.name}.pdf"
    with suppress(UserError, OSError):  # draw a missing or broken one again
        if figure_metadata.read(path) == loaded.metadata:
            return path.read_bytes()
    return None


def figure_page(loaded: save.LoadedFigure, drawing: bytes) -> Page:
    """Return the page of a figure: title, drawing over the width of the page, caption."""
    box = PdfReader(io.BytesIO(drawing)).pages[0].mediabox
    scale = 72 * (WIDTH - 2 * MARGIN) / float(box.width)
    bottom = HEIGHT - 1.9 - scale * float(box.height) / 72
    place = f"{loaded.metadata['experiment']}: {loaded.name}"
    text = page(loaded.figure.title, loaded.figure.caption(), place, bottom / HEIGHT)
    return Page(text, drawing, scale, bottom)


def _sections(part: dict[str, Any], titles: dict[str, str]) -> list[tuple[str, Table]]:
    return [(title, part[key]) for key, title in titles.items()]


def cover(part: dict) -> Figure:
    """Question, counts, answers, machine, commit, digest."""
    made = pdf_pages.empty_page()
    y = 1 - 1.1 / HEIGHT
    y = _lines(made, y, f"tokenscale: {part['name']}", size=11)
    y = _lines(made, y, part["question"], size=17, weight="bold") - 0.02
    v = part["validity"]
    y = _lines(
        made, y, f"{part['runs']} runs: " + ", ".join(f"{n} {word}" for word, n in v.items()), size=12, weight="bold"
    )
    answers, left = paired_comparisons.select_answers(part["answers"], ANSWERS)
    facts = [f"{a['text']} ({a['spread']}): {a['verdict']}." for a in answers]
    facts.append(f"{left}; the table of comparisons has all." if left else "")
    if part["scale"] == "demo":
        facts.append("Demo scale: conclusions not transferable.")
    facts.append(part["caution"] and f"{_sentence(part['caution'])} (world sizes above one).")
    facts.append(f"Text: {part['text']}." if part["text"] else "")
    facts.append(f"Data from {part['data_from']} (UTC)." if part["data_from"] else "")
    facts.append(f"Machine: {'; '.join(part['machines']) or 'not recorded'}.")
    commits = [f"{c['commit']} ({'with uncommitted changes' if c['dirty'] else 'clean'})" for c in part["commits"]]
    facts.append(f"Commit: {', '.join(commits) or 'not recorded'}.")
    facts.append(f"Made from tables with digest {part['digest'][:16]}.")
    facts += [part["note"], *(p["text"] for p in part["proof"]["parts"])]
    for fact in filter(None, facts):
        if y - 0.006 - len(_wrapped(fact, 10)) * _line(10) < LOWEST:
            _lines(made, y - 0.006, "What else is known stands on the experiment's page of the report.", size=10)
            break
        y = _lines(made, y - 0.006, fact, size=10)
    return made


def _sentence(text: str) -> str:
    """With a capital first letter, and the others as they are."""
    return text[:1].upper() + text[1:]


def page(title: str, caption: str, place: str, bottom: float) -> Figure:
    """The words of a figure's page: its title above, its caption below where the drawing ends (a share of the page)."""
    made = pdf_pages.empty_page()
    _lines(made, 1 - 0.7 / HEIGHT, place, size=9)
    _lines(made, 1 - 0.95 / HEIGHT, title, size=14, weight="bold")
    _lines(made, bottom - 0.2 / HEIGHT, caption, size=10)
    return made


def _wrapped(text: str, size: float, weight: str = "normal") -> list[str]:
    columns = int((WIDTH - 2 * MARGIN) * 72 / (size * _LETTER[weight]))
    return textwrap.wrap(text, columns) or [""]


def _line(size: float) -> float:
    """Height of a line, a share of the page."""
    return 1.5 * size / 72 / HEIGHT


def _lines(figure: Figure, y: float, text: str, *, size: float, weight: str = "normal") -> float:
    """Write wrapped text below `y` and return where it ends; dollar signs are no formulas here."""
    for line in _wrapped(text, size, weight):
        y -= _line(size)
        figure.text(MARGIN / WIDTH, y, line, fontsize=size, fontweight=weight, parse_math=False, in_layout=False)
    return y
