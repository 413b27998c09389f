"""The report as a PDF: answers, contents, figures (two a page), tables, claims, and how figures are measured.

All text is laid out as one document. The drawing of each figure, a PDF of its own, is then placed on its page.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from pypdf import PageObject, PdfReader, PdfWriter
from pypdf.errors import PyPdfError
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, StreamObject

from tokenscale.base.files import atomic
from tokenscale.report import captions, paired_comparisons, save, summary
from tokenscale.report.claims import claims_table, count_verdicts, read_claims
from tokenscale.report.pdf_pages import Drawing, PageWriter
from tokenscale.report.style import style
from tokenscale.report.table import Table

#: tables of `summary.experiment` → their headings, in this order
TABLES = {
    "throughput": "Throughput",
    "comparisons": "Offline against online",
    "validation": "Validation loss",
    "generations": "Generated texts",
    "steadiness": "Spread within runs and between them",
    "design": "Design: cells and repeats",
    "inventory": "Run inventory",
}
#: answers of an experiment on the first page, alone and beside other experiments
ALONE, BESIDE = 8, 3
_METADATA = {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None}
#: writes a part of the document where the last one ended
Write = Callable[[PageWriter], None]


@dataclass(frozen=True)
class _Chapter:
    """A chapter's title, what writes the text below it, and its sections: (title, what writes it)."""

    title: str
    head: Write
    figures: list[tuple[str, Write]] = field(default_factory=list)
    tables: list[tuple[str, Write]] = field(default_factory=list)


def write(
    experiments: list[str], tables: Path, output: Path, *, claims: Path | None = None, figures: Path | None = None
) -> None:
    """Draw all pages from the tables; equal tables give equal bytes.

    `claims` is what the command `claims` wrote. `figures` is the folder of figures drawn before: one that shows the
    same data is not drawn again.
    """
    title = "tokenscale report"
    rows = read_claims(claims) if claims else []
    parts = [summary.experiment(name, tables) for name in experiments]
    methods: list[tuple[str, str]] = []
    chapters = [_experiment(part, tables, figures, methods) for part in parts]
    first = chapters[0].figures.pop(0) if len(parts) == 1 and chapters[0].figures else None
    if rows:
        chapters.append(_Chapter("Claims", lambda to: _write_claims(to, rows)))
    if methods:
        chapters.append(_Chapter("How the figures are measured", lambda to: _write_methods(to, methods)))
    pages, outline = _lay_out(title, parts, rows, first, chapters)
    writer = PdfWriter(clone_from=io.BytesIO(_text_pages(pages.figures)))
    for number, drawings in enumerate(pages.drawings):
        if drawings:
            _place(writer, writer.pages[number], drawings)
    parent: Any = None
    for text, number, begins_chapter in outline:
        item = writer.add_outline_item(title=text, page_number=number, parent=None if begins_chapter else parent)
        parent = item if begins_chapter else parent
    writer.metadata = {"/Title": title}
    with atomic(output) as temporary, open(temporary, "wb") as file:
        writer.write(file)


def _lay_out(
    title: str,
    parts: Sequence[dict[str, Any]],
    claims: Sequence[dict[str, Any]],
    first: tuple[str, Write] | None,
    chapters: Sequence[_Chapter],
) -> tuple[PageWriter, list[tuple[str, int, bool]]]:
    """Return the pages, and (title, page from 0, whether a chapter begins) of each entry of the outline.

    `first` is the figure on the first page. The contents name sections only where there is one experiment.
    """
    to = PageWriter(title)
    _write_front(to, title, parts, claims)
    outline = [(title, 0, True)]
    if first:
        first[1](to)
        outline.append((first[0], to.title_page, False))
    numbers = []
    to.heading("Contents", 11)
    for chapter in chapters:
        numbers.append(to.entry(chapter.title, 8.5, "bold", 0))
        for name, _ in chapter.figures + chapter.tables if len(parts) == 1 else ():
            numbers.append(to.entry(name, 8, "normal", 10))
    to.space(10)
    listed = iter(numbers)
    for chapter in chapters:
        to.place = f"{title}: {chapter.title}"
        to.heading(chapter.title, 14)
        outline.append((chapter.title, to.title_page, True))
        next(listed)(to.title_page + 1)
        chapter.head(to)
        for name, write_section in chapter.figures + chapter.tables:
            write_section(to)
            outline.append((name, to.title_page, False))
            if len(parts) == 1:
                next(listed)(to.title_page + 1)
    return to, outline


def _text_pages(figures: Iterable[Figure]) -> bytes:
    """Return the pages as one PDF."""
    with style(), io.BytesIO() as buffer:
        with PdfPages(buffer, metadata=_METADATA) as pages:
            for figure in figures:
                pages.savefig(figure)
        return buffer.getvalue()


def _place(writer: PdfWriter, shows: PageObject, drawings: Sequence[Drawing]) -> None:
    """Add drawings to their page as forms (PDF 32000-1, 8.10), so that they keep their own fonts and names."""
    shared: Any = shows["/Resources"]  # matplotlib's pages share one dictionary
    resources = DictionaryObject(shared)
    forms = DictionaryObject(resources.get("/XObject", {}))
    commands = shows.get_contents().get_data()
    for n, drawing in enumerate(drawings):
        shown = PdfReader(io.BytesIO(drawing.pdf)).pages[0]
        form = DecodedStreamObject()
        form.set_data(shown.get_contents().get_data())
        form.update({NameObject("/Type"): NameObject("/XObject"), NameObject("/Subtype"): NameObject("/Form")})
        for key, name in (("/MediaBox", "/BBox"), ("/Resources", "/Resources")):
            form[NameObject(name)] = shown.raw_get(key).clone(writer)
        forms[NameObject(f"/Figure{n}")] = _add(writer, form)
        matrix = " ".join(f"{number:.4f}" for number in (drawing.scale, 0, 0, drawing.scale, drawing.x, drawing.y))
        commands += f"\nq {matrix} cm /Figure{n} Do Q".encode()
    resources[NameObject("/XObject")] = forms
    shows[NameObject("/Resources")] = resources
    content = DecodedStreamObject()
    content.set_data(commands)
    shows[NameObject("/Contents")] = _add(writer, content)


def _add(writer: PdfWriter, stream: StreamObject) -> Any:
    """Add a new stream to the document, compressed; return the reference to it."""
    return writer._add_object(stream.flate_encode())


def _experiment(part: dict[str, Any], tables: Path, figures: Path | None, methods: list[tuple[str, str]]) -> _Chapter:
    """Return the chapter of an experiment. The method of each figure is added to `methods`."""
    drawn: list[tuple[str, Write]] = []
    folded: list[str] = []
    with save.Tables(tables / part["name"]) as opened:
        for name in part["figures"]:
            loaded = save.load_figure(name, opened)
            if why := loaded.figure.folded():
                folded.append(f"{name} ({why})")
                continue
            drawing = _drawn(loaded, figures / part["name"]) if figures else None
            drawing = drawing or save.draw(loaded, ("pdf",))["pdf"]
            text, method = captions.split_caption(loaded.figure.caption())
            heading = loaded.figure.finding()
            methods += [(f"{part['name']}: {name}", method)] if method else []
            drawn.append((heading, _figure_section(heading, f"{text} ({part['name']}: {name})", drawing)))
    if folded:
        methods.append((f"{part['name']}: figures with nothing to show here", f"Not drawn: {'; '.join(folded)}."))
    found = {title: part[key] for key, title in TABLES.items() if part[key].rows}
    written = [(title, _table_section(title, table)) for title, table in found.items()]
    return _Chapter(part["name"], lambda to: _write_facts(to, part), drawn, written)


def _figure_section(title: str, caption: str, drawing: bytes) -> Write:
    box = PdfReader(io.BytesIO(drawing)).pages[0].mediabox
    return lambda to: to.drawing(drawing, (float(box.width), float(box.height)), title, caption)


def _table_section(title: str, table: Table) -> Write:
    def write_section(to: PageWriter) -> None:
        to.heading(title)
        to.table(table)

    return write_section


def _drawn(loaded: save.LoadedFigure, folder: Path) -> bytes | None:
    """Return the figure's PDF from the folder, if it was drawn from the same data."""
    path, data = (folder / f"{loaded.name}.{kind}" for kind in ("pdf", "csv"))
    with suppress(PyPdfError, OSError):  # draw a missing or broken one again
        if data.read_bytes() == loaded.csv.encode() and len(PdfReader(path).pages) == 1:
            return path.read_bytes()
    return None


def _write_front(to: PageWriter, title: str, parts: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]]) -> None:
    """Write the questions, their answers with verdicts, and the cautions."""
    alone, shared = len(parts) == 1, summary.shared_cautions(parts)
    if not alone:
        to.heading(title, 16)
    for part in parts:
        to.heading(part["question"] or part["name"], 14 if alone else 10)
        answers, left = paired_comparisons.select_answers(part["answers"], ALONE if alone else BESIDE)
        for answer in answers:
            spread = f" ({answer['spread']})" if answer["spread"] else ""
            to.paragraph(f"{captions.sentence(answer['verdict']).strip('. ')}: {answer['text']}{spread}.", 9)
            to.space(3)
        if left:
            to.paragraph(f"{left}: see its chapter.", 9)
        for caution in summary.list_cautions(part):
            if caution not in shared:
                to.paragraph(f"Caution: {caution}", 9, "bold")
        to.space(6)
    for caution in shared:
        to.paragraph(f"Caution, all experiments: {caution}", 9, "bold")
    if claims:
        counts = ", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(claims).items())
        to.paragraph(f"Claims of the source studies: {counts}.", 9)
        to.space(6)


def _write_facts(to: PageWriter, part: dict[str, Any]) -> None:
    """Write what an experiment's numbers come from."""
    commits = [f"{c['commit']} ({'with uncommitted changes' if c['dirty'] else 'clean'})" for c in part["commits"]]
    facts = [
        f"{part['runs']} runs: {', '.join(f'{n} {word}' for word, n in part['validity'].items())}.",
        f"Text: {part['text']}." if part["text"] else "",
        f"Data from {part['data_from']} (UTC)." if part["data_from"] else "",
        f"Machine: {'; '.join(part['machines']) or 'not recorded'}.",
        f"Commit: {', '.join(commits) or 'not recorded'}.",
        f"Made from tables with digest {part['digest'][:16]}.",
        part["note"],
        *(p["text"] for p in part["proof"]["parts"]),
    ]
    for fact in filter(None, facts):
        to.paragraph(fact, 8.5)
    to.space(8)


def _write_claims(to: PageWriter, rows: list[dict[str, Any]]) -> None:
    for document, where in dict.fromkeys((row["document"], row["where"]) for row in rows):
        to.heading(document, 11)
        if where:
            to.paragraph(where)
        to.table(claims_table(rows, document))


def _write_methods(to: PageWriter, methods: Sequence[tuple[str, str]]) -> None:
    for name, method in methods:
        to.heading(name, 8.5)
        to.paragraph(method, 8)
