"""The report as a PDF: the claims, and of each experiment the numbers of the verdict, a page a figure, and the tables.

Every page of a figure is a document of its own that is put between the others: cut out, it holds nothing of theirs,
and a note outside its visible part is the figure's passport.
"""

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from pypdf import PdfReader, PdfWriter

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, sha256_file
from tokenscale.report import claims as ledger
from tokenscale.report import figure_metadata as passport
from tokenscale.report import paired_comparisons as pairs
from tokenscale.report import pdf_pages as sheets
from tokenscale.report import pdf_placed, registry, save, summary
from tokenscale.report.pdf_pages import HEIGHT, WIDTH
from tokenscale.report.pdf_pages import MARGIN as _MARGIN
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
#: outlines of the letters that a page uses: with so many documents, to cut a TrueType font for each takes half the time
_FONTS = {"pdf.fonttype": 3}
#: names of what is made of an experiment beside its figures: pages before and after them
FRONT, BACK = "front", "back"
#: folder of tables, figure (or one of these two) → its pages, inside `known`
_PAGES: dict[tuple[Path, str], bytes] = {}
_METADATA = {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None}


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

    `claims` is what the verb `claims` wrote. A `view` (see `views.py`) has its claims and figures alone. `figures` is
    the folder of those that are drawn already: none of them is drawn again whose passport is the one it would get.
    """
    writer = PdfWriter()
    for title, chapters in _parts(experiments, tables, claims, view, figures):
        chapter = None
        for name, document in chapters:
            first = len(writer.pages)
            writer.append(io.BytesIO(document), import_outline=False)
            placed = writer.add_outline_item(title=name or title, page_number=first, parent=chapter)
            chapter = chapter or placed
    title = VIEWS[view].title if view else "tokenscale report"
    carried = of_report(experiments, tables, claims, view)
    writer.metadata = {"/Title": title, "/Subject": passport.text(carried)}
    with atomic(output) as temporary, open(temporary, "wb") as file:
        writer.write(file)


def of_report(experiments: list[str], tables: Path, claims: Path | None, view: str | None) -> passport.Passport:
    """What the whole document says of itself."""
    return {
        "passport": passport.VERSION,
        "report": {name: passport.digest(tables / name) for name in experiments},
        "order": experiments,
        "claims": sha256_file(claims) if claims else None,
        "view": view,
        "code": passport.code("tokenscale.report.pdf", *FIGURES.values()),
        "libraries": passport.libraries(),
    }


def _parts(
    experiments: list[str], tables: Path, claims: Path | None, view: str | None, figures: Path | None
) -> Iterator[tuple[str, Iterable[tuple[str, bytes]]]]:
    """(title, its documents by their titles) of the claims and of each experiment; each first one has no title."""
    only = VIEWS[view].claims if view else None
    if claims is not None:
        rows = [row for row in ledger.read(claims) if only is None or row["id"] in only]
        yield "Claims", [("", document(_claims(rows)))]
    for name in experiments:
        yield name, documents(name, tables, view, figures)


def _claims(rows: list[dict[str, Any]]) -> list[Figure]:
    pages = sheets.Sheets("tokenscale: claims")
    pages.heading("Claims", 17)
    pages.paragraph(", ".join(f"{n} {verdict}" for verdict, n in ledger.counts(rows).items()) + ".", 10)
    for document, where in dict.fromkeys((row["document"], row["where"]) for row in rows):
        pages.heading(document, 11)
        if where:
            pages.paragraph(where)
        pages.table(ledger.table(rows, document))
    return pages.figures


def documents(
    name: str, tables: Path, view: str | None = None, figures: Path | None = None
) -> Iterator[tuple[str, bytes]]:
    """(title, bytes of a PDF) of the parts of an experiment; the first has no title but the experiment's."""
    part = summary.experiment(name, tables)
    shown = [figure for figure in part["figures"] if view is None or figure in VIEWS[view].figures]
    if view is not None and not shown:
        return
    kept = {key: _PAGES[tables / name, key] for key in (FRONT, BACK) if (tables / name, key) in _PAGES}
    around = kept if kept and view is None else pages_around(part, view)
    yield "", around[FRONT]
    with save.Tables(tables / name) as opened:
        for figure in shown:
            page = _PAGES.get((tables / name, figure))
            if page is None:
                made = save.made(figure, opened, *roots(figure))
                page = figure_document(made, drawing=_drawn(made, figures / name) if figures else None)
            yield registry.module(figure).TITLE, page
    if around[BACK]:
        yield "Tables", around[BACK]


def _drawn(made: save.Made, folder: Path) -> bytes | None:
    """The figure's own PDF, where one lies in the folder that was drawn of the same data by the same code."""
    path = folder / f"{made.name}.pdf"
    own = made.passport | {"code": passport.code(*save.modules(made.name))}
    with suppress(UserError, OSError):  # a missing or a broken one is drawn again
        if passport.read(path) == own:
            return path.read_bytes()
    return None


def pages_around(part: dict[str, Any], view: str | None = None) -> dict[str, bytes]:
    """Pages before and after the figures of an experiment (`summary.experiment`); no bytes where there are none."""
    name, whole = part["name"], view is None
    before = sheets.tables(name, _sections(part, BEFORE)) if whole else []
    after = sheets.tables(name, _sections(part, AFTER)) if whole else []
    return {FRONT: document([cover(part), *before]), BACK: document(after) if after else b""}


@contextmanager
def known(pages: Mapping[tuple[Path, str], bytes]) -> Iterator[None]:
    """Inside it, these pages are taken as they are: of (folder of tables, figure), as `save_figure` returns them, and
    those of `pages_around` by its names."""
    _PAGES.update(pages)
    try:
        yield
    finally:
        _PAGES.clear()


def save_figure(name: str, tables: Path, output: Path) -> bytes:
    """`save.save`, and the figure's page, for which its PDF need not be drawn once more."""
    made = save.make(name, tables)
    save.write(made, output)
    carried = made.passport | {"code": passport.code(*roots(name))}
    return figure_document(made, carried, output.with_name(f"{output.name}.pdf").read_bytes())


def roots(figure: str) -> tuple[str, str]:
    """Roots of the code that draws the page of a figure."""
    return save.modules(figure, "tokenscale.report.pdf")


def figure_document(made: save.Made, carried: passport.Passport | None = None, drawing: bytes | None = None) -> bytes:
    """The page of a figure with its own passport, or the one that is `carried`; `drawing` is the figure's PDF where it
    is at hand."""
    of = made.frames.values()
    drawing = drawing or save.draw(made, kinds=("pdf",))["pdf"]
    box = PdfReader(io.BytesIO(drawing)).pages[0].mediabox
    scale = 72 * (WIDTH - 2 * _MARGIN) / float(box.width)
    bottom = HEIGHT - 1.9 - scale * float(box.height) / 72
    words = page(
        made.module.TITLE, made.module.caption(*of), f"{made.passport['experiment']}: {made.name}", bottom / HEIGHT
    )
    text = document([words], passport.text(carried or made.passport))
    return pdf_placed.placed(drawing, text, (scale, 0, 0, scale, 72 * _MARGIN, 72 * bottom))


def document(figures: Iterable[Figure], note: str = "") -> bytes:
    """Pages as a PDF; `note` is put on each."""
    with style(), rc_context(_FONTS), io.BytesIO() as buffer:
        with PdfPages(buffer, metadata=_METADATA) as pages:
            for figure in figures:
                if note:
                    pages.attach_note(note)
                pages.savefig(figure)
        return buffer.getvalue()


def _sections(part: dict[str, Any], titles: dict[str, str]) -> list[tuple[str, Table]]:
    return [(title, part[key]) for key, title in titles.items()]


def cover(part: dict) -> Figure:
    """Question, counts, answers, machine, commit, digest."""
    made = Figure(figsize=(WIDTH, HEIGHT), layout="none")
    y = 1 - 1.1 / HEIGHT
    y = _lines(made, y, f"tokenscale: {part['name']}", size=11)
    y = _lines(made, y, part["question"], size=17, weight="bold") - 0.02
    v = part["validity"]
    y = _lines(
        made, y, f"{part['runs']} runs: " + ", ".join(f"{n} {word}" for word, n in v.items()), size=12, weight="bold"
    )
    answers, left = pairs.select_answers(part["answers"], ANSWERS)
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
    made = Figure(figsize=(WIDTH, HEIGHT), layout="none")
    _lines(made, 1 - 0.7 / HEIGHT, place, size=9)
    _lines(made, 1 - 0.95 / HEIGHT, title, size=14, weight="bold")
    _lines(made, bottom - 0.2 / HEIGHT, caption, size=10)
    return made


def _wrapped(text: str, size: float, weight: str = "normal") -> list[str]:
    columns = int((WIDTH - 2 * _MARGIN) * 72 / (size * _LETTER[weight]))
    return textwrap.wrap(text, columns) or [""]


def _line(size: float) -> float:
    """Height of a line, a share of the page."""
    return 1.5 * size / 72 / HEIGHT


def _lines(figure: Figure, y: float, text: str, *, size: float, weight: str = "normal") -> float:
    """Write wrapped text below `y` and return where it ends; dollar signs are no formulas here."""
    for line in _wrapped(text, size, weight):
        y -= _line(size)
        figure.text(_MARGIN / WIDTH, y, line, fontsize=size, fontweight=weight, parse_math=False, in_layout=False)
    return y
