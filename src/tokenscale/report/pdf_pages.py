"""Pages of text and tables for the PDF: wrapped by the widths of the letters, and continued on the next page."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D

from tokenscale.report.style import GRID, TEXT
from tokenscale.report.table import Table

#: A4 and its margin, inches
WIDTH, HEIGHT = 8.27, 11.69
MARGIN = 0.7
#: points: of letters in a table, between its columns, and the narrowest that a column is squeezed to
SIZE, GAP, LEAST = 6.5, 7.0, 18.0
LINE = 1.35
#: points between the margins, and of letters in titles and captions of figures
ROOM, TITLE, CAPTION = 72 * (WIDTH - 2 * MARGIN), 10.5, 8.0
#: a drawing is never narrower than this share of the page's width
SMALLEST = 0.68
#: what stands for a letter that the fonts lack
LACKING = "\ufffd"


def empty_page() -> Figure:
    """A page without a layout engine: its texts stay where they are put."""
    return Figure(figsize=(WIDTH, HEIGHT), layout="none")  # type: ignore[arg-type]  # its annotation lacks "none"


@dataclass(frozen=True)
class Drawing:
    """A PDF that is placed on a page: its bytes, its scale, and its lower left corner in points."""

    pdf: bytes
    scale: float
    x: float
    y: float


class PageWriter:
    """Pages that are filled from the top. `figures` holds their texts, `drawings` what is placed on each of them."""

    def __init__(self, place: str):
        """`place` stands at the head of each page that begins from now on; it may be changed."""
        self.place = place
        self.figures: list[Figure] = []
        self.drawings: list[list[Drawing]] = []
        #: page of the last title, from 0
        self.title_page = 0
        self.y = 0.0

    def heading(self, text: str, size: float = 12) -> None:
        """A title, with room for a few lines below it on the same page."""
        self._need(size * LINE * (2 + len(wrap(text, ROOM, size, "bold"))))
        self.title_page = len(self.figures) - 1
        self.y -= 0.5 * size
        self.paragraph(text, size, "bold")
        self.y -= 3

    def paragraph(self, text: str, size: float = 8, weight: str = "normal") -> None:
        """Text over the width of the page."""
        for line in wrap(text, ROOM, size, weight):
            self._need(size * LINE)
            self.y -= size * LINE
            self._write(0.0, line, size, weight)

    def space(self, points: float) -> None:
        """Leave room, but not at the head of a page."""
        self.y -= points

    def entry(self, text: str, size: float, weight: str, indent: float) -> Callable[[int], None]:
        """Write a line of a table of contents; return the function that adds the number of its page, from 1."""
        line = wrap(text, ROOM - indent - 30, size, weight)[0]
        self._need(size * LINE)
        self.y -= size * LINE
        self._write(indent, line, size, weight)
        page, y = self.figures[-1], self.y / (72 * HEIGHT)

        def number(n: int) -> None:
            page.text(1 - MARGIN / WIDTH, y, str(n), fontsize=size, fontweight=weight, ha="right", parse_math=False)

        return number

    def drawing(self, pdf: bytes, size: tuple[float, float], title: str, caption: str) -> None:
        """Place a drawing of this size (points) below its title and above its caption; all three stay on one page.

        A drawing is as wide as the page, or narrower so that two figures fit a page.
        """
        width, height = size
        heads, lines = wrap(title, ROOM, TITLE, "bold"), wrap(caption, ROOM, CAPTION)
        texts = LINE * (TITLE * len(heads) + CAPTION * len(lines)) + 26
        full = ROOM / width
        half = (72 * (HEIGHT - 2 * MARGIN) - 24) / 2 - texts
        scale = max(min(full, half / height), SMALLEST * full)
        left = self.y - 72 * MARGIN - texts
        if self.figures and left < scale * height and left / height >= SMALLEST * full:
            scale = left / height
        self._need(min(texts + scale * height, 72 * (HEIGHT - 2.5 * MARGIN)))
        self.title_page = len(self.figures) - 1
        self.y -= 8
        self.paragraph(title, TITLE, "bold")
        self.y -= 6 + scale * height
        x = 72 * MARGIN + (ROOM - scale * width) / 2
        self.drawings[-1].append(Drawing(pdf, scale, x, self.y))
        self.y -= 2
        self.paragraph(caption, CAPTION)
        self.y -= 10

    def table(self, table: Table) -> None:
        """A table with its head on every page that it needs, and its caption below."""
        widths = columns(table, ROOM)
        head = [name for name, _ in table.columns]
        self._row(table, widths, head, "bold", above=3 * SIZE * LINE)
        for cells in table.rows:
            if self._row(table, widths, cells, "normal", head=head):
                self._rule(0.4)
        if table.caption:
            self.y -= 4
            self.paragraph(table.caption, 7.5)
        self.y -= 8

    def _row(self, table, widths, cells, weight, *, head=None, above=0.0) -> bool:
        lines = [wrap(text, width, SIZE, weight) or [""] for text, width in zip(cells, widths, strict=True)]
        height = max(map(len, lines)) * SIZE * LINE + 3
        if self._need(min(height, 72 * (HEIGHT - 2.5 * MARGIN)) + above) and head is not None:
            self._row(table, widths, head, "bold")
        top = self.y
        for number in range(max(map(len, lines))):
            self._need(SIZE * LINE)  # of a row that is longer than a page
            self.y -= SIZE * LINE
            x = 0.0
            for width, text, (_, right) in zip(widths, lines, table.columns, strict=True):
                if number < len(text):
                    self._write(x + width * right, text[number], SIZE, weight, "right" if right else "left")
                x += width + GAP
        self.y -= 3
        if weight == "bold":
            self._rule(0.8)
        return top > self.y

    def _need(self, points: float) -> bool:
        """Begin a new page where the rest of this one is not as high; True where one was begun."""
        if self.figures and self.y - points >= 72 * MARGIN:
            return False
        self.figures.append(empty_page())
        self.drawings.append([])
        self.y = 72 * (HEIGHT - 0.7)
        self._write(0, self.place, 8, "normal")
        self._write(ROOM, str(len(self.figures)), 8, "normal", "right")
        self.y -= 12
        return True

    def _write(self, x: float, text: str, size: float, weight: str, align: str = "left") -> None:
        at = (72 * MARGIN + x) / (72 * WIDTH), self.y / (72 * HEIGHT)
        text = "".join(c if _drawn(c, weight) else LACKING for c in text)
        self.figures[-1].text(*at, text, fontsize=size, fontweight=weight, ha=align, parse_math=False)

    def _rule(self, width: float) -> None:
        y = (self.y + 0.8) / (72 * HEIGHT)
        colour = TEXT if width > 0.5 else GRID
        self.figures[-1].add_artist(Line2D([MARGIN / WIDTH, 1 - MARGIN / WIDTH], [y, y], linewidth=width, color=colour))


def columns(table: Table, available: float) -> list[float]:
    """Widths of the columns, in points: what their longest cells need, the widest cut until all fit."""
    natural = [
        max([length(name, SIZE, "bold"), *(length(row[i], SIZE) for row in table.rows)]) + 1
        for i, (name, _) in enumerate(table.columns)
    ]
    room = available - GAP * (len(natural) - 1)
    if sum(natural) <= room:
        return natural
    low, high = LEAST, max(natural)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(n, middle) for n in natural) <= room else (low, middle)
    widths = [min(n, low) for n in natural]
    shrunk = min(1.0, room / sum(widths))
    return [width * shrunk for width in widths]


def wrap(text: str, width: float, size: float, weight: str = "normal") -> list[str]:
    """Lines of a text that are no wider than `width` points; a wider word is broken, after a hyphen if it can be."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if length(joined, size, weight) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = _broken(word, width, size, weight)
        lines += whole
    return [*lines, line] if line else lines


def _broken(word: str, width: float, size: float, weight: str) -> list[str]:
    parts = []
    while length(word, size, weight) > width and len(word) > 1:
        end = max((n for n in range(1, len(word)) if length(word[:n], size, weight) <= width), default=1)
        hyphen = max(word.rfind(sign, 0, end) for sign in "-=_/") + 1
        end = hyphen if hyphen > end / 2 else end
        parts.append(word[:end])
        word = word[end:]
    return [*parts, word]


def length(text: str, size: float, weight: str = "normal") -> float:
    """Width of a text in points, without kerning."""
    return size * sum(_advance(c, weight) for c in text)


@cache
def _advance(character: str, weight: str) -> float:
    """Width of a letter in ems."""
    if not _drawn(character, weight):
        return _advance(LACKING, weight)
    font = _font(weight)
    font.set_size(100, 72)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 100


@cache
def _drawn(character: str, weight: str) -> bool:
    """Whether the fonts have the letter; of texts that models write, they lack many."""
    return ord(character) in _font(weight).get_charmap()


def _font(weight: str) -> FT2Font:
    return get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
