"""The report as a PDF: answers, figures (two a page), main tables, and the claims that these runs
test.

matplotlib writes text and tables, line by line; the drawn PDF of each figure is then placed on its
page.
"""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from pypdf import PdfReader, PdfWriter, Transformation

from tokenscale.base.files import atomic
from tokenscale.report import captions, paired_comparisons, summary
from tokenscale.report.claims import claims_table, count_verdicts, read_claims
from tokenscale.report.save import read_figure
from tokenscale.report.style import GRID, TEXT, style
from tokenscale.report.table import Table

#: tables of a description → their headings, in this order; the page has all others
TABLES = {
    "throughput": "Throughput",
    "comparisons": "Comparisons",
    "validation": "Validation loss",
    "generations": "Generated texts",
}
#: answers of an experiment on the first page, alone and beside other experiments
ALONE = 8
BESIDE = 3
#: A4 and the line from margin to margin, in points (1/72 inch)
WIDTH = 595.0
HEIGHT = 842.0
MARGIN = 50.0
ROOM = WIDTH - 2 * MARGIN
#: points: letters of tables, the gap between columns, the widest word that widens a column; line
#: height in letter sizes
SIZE = 6.5
GAP = 7.0
LONGEST_WORD = 64.0
LINE = 1.35
#: points: letters of a figure's title and caption; the narrowest drawing, as a share of the line
TITLE = 10.5
CAPTION = 7.5
NARROWEST = 0.6
#: replaces a character that the fonts lack
LACKING = "\ufffd"
_METADATA = {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None}


def write(
    parts: Sequence[dict[str, Any]],
    figures: Path,
    output: Path,
    *,
    claims: Path | None = None,
) -> None:
    """Write the PDF of the described experiments with their drawn `figures`; equal tables give equal
    bytes. `claims` is the file of judged claims.
    """
    rows = read_claims(claims) if claims else []
    pages = PageWriter("tokenscale report")
    _write_front(pages, parts, claims=rows)
    for part in parts:
        _write_experiment(pages, part, figures=figures / part["name"])
    tested = [row for row in rows if row["experiment"]]
    if tested:
        pages.chapter("Claims")
        for document, where in dict.fromkeys((row["document"], row["where"]) for row in tested):
            pages.heading(document, size=11)
            pages.paragraph(where)
            pages.table(claims_table(tested, document))
    with atomic(output) as temporary:
        temporary.write_bytes(pages.to_pdf())


def _write_front(
    to: "PageWriter", parts: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]]
) -> None:
    """Write the questions, their answers with verdicts, the cautions, and a count of the claims."""
    alone = len(parts) == 1
    shared = summary.shared_cautions(parts)
    if not alone:
        to.heading(f"Report on {len(parts)} experiments", size=16)
    for part in parts:
        to.heading(part["question"] or part["name"], size=14 if alone else 10)
        answers, left = paired_comparisons.select_answers(
            part["answers"], most=ALONE if alone else BESIDE
        )
        for answer in answers:
            spread = f" ({answer['spread']})" if answer["spread"] else ""
            to.paragraph(
                f"{captions.as_sentence(answer['verdict']).strip('. ')}: {answer['text']}{spread}.",
                size=9,
            )
            to.y -= 3
        if left:
            to.paragraph(f"{left}: see its chapter.", size=9)
        for caution in summary.list_cautions(part):
            if caution not in shared:
                to.paragraph(f"Caution: {caution}", size=9, weight="bold")
        to.y -= 6
    for caution in shared:
        to.paragraph(f"Caution, all experiments: {caution}", size=9, weight="bold")
    if claims:
        counts = ", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(claims).items() if n)
        to.paragraph(f"Claims: {counts}.", size=9)


def _write_experiment(to: "PageWriter", part: dict[str, Any], figures: Path) -> None:
    """Write what an experiment's numbers come from, its figures and its main tables."""
    to.chapter(part["name"])
    commits = [f"{c['commit']}{' with uncommitted changes' * c['dirty']}" for c in part["commits"]]
    facts = [
        (
            f"{part['runs']} runs: "
            f"{', '.join(f'{n} {word}' for word in summary.VALIDITY if (n := part['validity'][word]))}."
        ),
        part["text"] and f"Text: {part['text']}.",
        part["data_from"] and f"Data from {part['data_from']} (UTC).",
        f"Machine: {'; '.join(part['machines']) or 'not recorded'}.",
        f"Commit: {', '.join(commits) or 'not recorded'}.",
        f"Tables: digest {part['digest'][:16]}.",
        (unknown := summary.describe_unknown([part])) and f"{unknown}.",
    ]
    to.paragraph(" ".join(filter(None, facts)))
    for text in filter(None, [part["note"], *(proof["text"] for proof in part["proof"]["parts"])]):
        to.paragraph(text)
    folded = []
    for name in part["figures"]:
        words, contents = read_figure(figures / f"{name}.json")
        if words["folded"]:
            folded.append(f"{name} ({words['folded']})")
            continue
        caption = " ".join(filter(None, [words["caption"], words["method"]]))
        to.drawing(
            contents["pdf"],
            title=words["finding"],
            caption=f"{caption} ({part['name']}: {name})",
        )
    if folded:
        to.paragraph(f"Nothing to show: {'; '.join(folded)}.")
    for key, title in TABLES.items():
        if part[key].rows:
            to.heading(title, below=10 * SIZE * LINE)
            to.table(part[key])


class PageWriter:
    """Pages that are filled from the top. `y` is the height of the last line above the page's lower
    edge, in points.
    """

    def __init__(self, title: str):
        self.title = self.place = title  # `place` stands at the head of each new page
        self.figures: list[Figure] = []
        #: page → (PDF, scale, x, y) of each drawing
        self.drawings: list[list[tuple[bytes, float, float, float]]] = []
        #: (title, page from 0, level from 0)
        self.outline: list[tuple[str, int, int]] = []
        #: page from 0 → characters on it that the fonts lack
        self.lacking: Counter[int] = Counter()
        self.y = 0.0

    def chapter(self, title: str) -> None:
        """Begin a chapter, on the same page if there is room."""
        self.place = f"{self.title}: {title}"
        self.y -= 8
        self.heading(title, size=14, level=0)

    def heading(self, text: str, size: float = 12, *, level: int = 1, below: float = 0.0) -> None:
        """Write a title that stays on a page with the next lines, or with `below` points."""
        self._need(
            size
            * LINE
            * len(
                wrap(
                    text,
                    width=ROOM,
                    size=size,
                    weight="bold",
                )
            )
            + 0.5 * size
            + 3
            + (below or 3 * size * LINE)
        )
        self.outline.append((text, len(self.figures) - 1, level))
        self.y -= 0.5 * size
        self.paragraph(text, size, weight="bold")
        self.y -= 3

    def paragraph(self, text: str, size: float = 8, weight: str = "normal") -> None:
        """Write text over the width of the page."""
        for line in wrap(
            text,
            width=ROOM,
            size=size,
            weight=weight,
        ):
            self._need(size * LINE)
            self.y -= size * LINE
            self._write(0.0, line, size, weight)

    def drawing(self, pdf: bytes, title: str, caption: str) -> None:
        """Place a one-page PDF between its title and its caption, on one page.

        It is as wide as the line, or narrower so that two figures fill a page or the rest of a page
        is used.
        """
        box = PdfReader(io.BytesIO(pdf)).pages[0].mediabox
        width = float(box.width)
        height = float(box.height)
        lines = len(wrap(caption, width=ROOM, size=CAPTION))
        texts = (
            TITLE
            * LINE
            * len(
                wrap(
                    title,
                    width=ROOM,
                    size=TITLE,
                    weight="bold",
                )
            )
            + CAPTION * LINE * lines
            + 22
        )
        full = ROOM / width
        page = HEIGHT - 2 * MARGIN - 14
        scale = max(min(full, (page / 2 - texts) / height), NARROWEST * full)
        rest = (self.y - MARGIN - texts) / height
        if NARROWEST * full <= rest < scale:
            scale = rest
        scale = min(scale, (page - texts) / height)
        self.heading(title, size=TITLE, below=scale * height + CAPTION * LINE * lines + 2)
        self.y -= 2 + scale * height
        self.drawings[-1].append((pdf, scale, MARGIN + (ROOM - scale * width) / 2, self.y))
        self.paragraph(caption, size=CAPTION)
        self.y -= 8

    def table(self, table: Table) -> None:
        """Write a table, with its head on every page that it needs and its caption below."""
        widths = column_widths(table, room=ROOM)
        head = [name for name, _ in table.columns]
        self._need(5 * SIZE * LINE)
        self._row(
            table,
            widths,
            cells=head,
            weight="bold",
        )
        for cells in table.rows:
            height = (
                max(
                    len(wrap(text, width, size=SIZE))
                    for text, width in zip(cells, widths, strict=True)
                )
                * SIZE
                * LINE
            )
            if self._need(min(height + 3, HEIGHT - 3 * MARGIN)):
                self._row(
                    table,
                    widths,
                    cells=head,
                    weight="bold",
                )
            self._row(
                table,
                widths,
                cells,
                weight="normal",
            )
        self.y -= 4
        self.paragraph(table.caption, size=7.5)
        self.y -= 8

    def _row(
        self, table: Table, widths: Sequence[float], cells: Sequence[str], weight: str
    ) -> None:
        lines = [
            wrap(
                text,
                width,
                size=SIZE,
                weight=weight,
            )
            for text, width in zip(cells, widths, strict=True)
        ]
        for number in range(max(map(len, lines))):
            self._need(SIZE * LINE)  # a row may be longer than a page
            self.y -= SIZE * LINE
            x = 0.0
            for width, text, (_, right) in zip(widths, lines, table.columns, strict=True):
                if number < len(text):
                    self._write(
                        x + width * right, text[number], SIZE, weight, "right" if right else "left"
                    )
                x += width + GAP
        self.y -= 3
        colour, width = (TEXT, 0.8) if weight == "bold" else (GRID, 0.4)
        ends = (MARGIN / WIDTH, 1 - MARGIN / WIDTH)
        y = (self.y + 0.8) / HEIGHT
        self.figures[-1].add_artist(Line2D(ends, [y, y], linewidth=width, color=colour))

    def _need(self, points: float) -> bool:
        """Begin a new page if the rest of this one is not as high; return whether one was begun."""
        if self.figures and self.y - points >= MARGIN:
            return False
        # without a layout engine, texts stay where they are put
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="none")  # type: ignore[arg-type]
        self.figures.append(figure)
        self.drawings.append([])
        self.y = HEIGHT - MARGIN
        self._write(0, self.place, 8, "normal")
        self._write(ROOM, str(len(self.figures)), 8, "normal", "right")
        self.y -= 12
        return True

    def _write(self, x: float, text: str, size: float, weight: str, align: str = "left") -> None:
        shown = "".join(c if _has_glyph(c, weight) else LACKING for c in text)
        if lacking := sum(old != new for old, new in zip(text, shown, strict=True)):
            self.lacking[len(self.figures) - 1] += lacking
        at = (MARGIN + x) / WIDTH, self.y / HEIGHT
        self.figures[-1].text(
            *at, shown, fontsize=size, fontweight=weight, ha=align, parse_math=False
        )

    def to_pdf(self) -> bytes:
        """Return all pages with their drawings and the outline, and at their end a sentence on
        characters that the fonts lack.
        """
        if self.lacking:
            places = ", ".join(str(page + 1) for page in sorted(self.lacking))
            self.paragraph(
                f"{self.lacking.total():,} characters of this document are missing from its fonts "
                f"and stand as boxes, on page {places}. The HTML page shows them."
            )
        buffer = io.BytesIO()
        with style(), PdfPages(buffer, metadata=_METADATA) as texts:
            for figure in self.figures:
                texts.savefig(figure)
        writer = PdfWriter(clone_from=buffer)
        for page, drawings in zip(writer.pages, self.drawings, strict=True):
            for pdf, scale, x, y in drawings:
                drawing = PdfReader(io.BytesIO(pdf)).pages[0]
                page.merge_transformed_page(drawing, Transformation().scale(scale).translate(x, y))
            page.compress_content_streams()
        chapter: Any = None
        for title, number, level in self.outline:
            item = writer.add_outline_item(
                title=title, page_number=number, parent=chapter if level else None
            )
            chapter = chapter if level else item
        writer.metadata = {"/Title": self.title}
        output = io.BytesIO()
        writer.write(output)
        return output.getvalue()


def column_widths(table: Table, room: float) -> list[float]:
    """Return the width of each column in points, `room` at most with the gaps.

    A column has what its longest cell needs. If that is too wide, columns of text share the line in
    proportion to the square root of their longest cell, which makes rows about as high as they are
    in a balanced layout; a short word is not broken.
    """
    cells = [
        [(name, "bold"), *((row[i], "normal") for row in table.rows)]
        for i, (name, _) in enumerate(table.columns)
    ]
    longest = [
        max(text_width(text, size=SIZE, weight=weight) for text, weight in column) + 1
        for column in cells
    ]
    words = [
        min(
            LONGEST_WORD,
            whole,
            max(
                text_width(w, size=SIZE, weight=weight) + 1
                for t, weight in column
                for w in t.split(" ")
            ),
        )
        for column, whole in zip(cells, longest, strict=True)
    ]
    room -= GAP * (len(cells) - 1)
    if sum(longest) <= room:
        return longest

    def share(scale: float) -> list[float]:
        return [
            min(max(scale * whole**0.5, word), whole)
            for word, whole in zip(words, longest, strict=True)
        ]

    low = 0.0
    high = room
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(share(middle)) <= room else (low, middle)
    widths = share(low)
    return [width * min(1.0, room / sum(widths)) for width in widths]


def wrap(text: str, width: float, size: float, weight: str = "normal") -> list[str]:
    """Return lines of at most `width` points; a wider word is broken, after a hyphen if there is
    one.
    """
    lines: list[str] = []
    line = ""
    for word in _break_words(
        text,
        width,
        size=size,
        weight=weight,
    ):
        joined = f"{line} {word}" if line else word
        if text_width(joined, size, weight=weight) > width and line:
            lines.append(line)
            joined = word
        line = joined
    return [*lines, line] if line else lines


def _break_words(text: str, width: float, size: float, weight: str) -> Iterator[str]:
    for word in text.split(" "):
        while text_width(word, size, weight=weight) > width and len(word) > 1:
            end = max(
                (
                    n
                    for n in range(1, len(word))
                    if text_width(word[:n], size, weight=weight) <= width
                ),
                default=1,
            )
            hyphen = max(word.rfind(sign, 0, end) for sign in "-=_/") + 1
            end = hyphen if hyphen > end / 2 else end
            yield word[:end]
            word = word[end:]
        yield word


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of a text in points, without kerning."""
    return size * sum(_advance(c, weight) for c in text)


@cache
def _advance(character: str, weight: str) -> float:
    """Return the width of a character in ems."""
    font = _font(weight)
    font.set_size(100, 72)
    return (
        font.load_char(
            ord(character if _has_glyph(character, weight) else LACKING)
        ).linearHoriAdvance
        / 6553600
    )


@cache
def _has_glyph(character: str, weight: str) -> bool:
    """Return whether the font has the character; texts that models generate contain others."""
    return ord(character) in _font(weight).get_charmap()


def _font(weight: str) -> FT2Font:
    return get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
