"""How figures look: one palette, one marker an approach, text and grid in colours that the page can
replace.

Colours follow Okabe & Ito (2008); marker, fill and dash say the same again. Filled and solid:
tokens come from a store; open and dashed: tokenized while training.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pandas as pd
from matplotlib import font_manager, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokenscale.report import text_layout

#: the small fonts (`docs/fonts.py`), found by this name, which their own table of names has
FAMILY = "DejaVu Sans Figures"
FILES = (
    "fonts/DejaVuSans.ttf",
    "fonts/DejaVuSans-Bold.ttf",
    "fonts/DejaVuSans-Oblique.ttf",
    "fonts/LICENSE",
)


@cache
def register() -> None:
    """Register the small fonts with matplotlib."""
    for name in FILES[:-1]:
        font_manager.fontManager.addfont(Path(__file__).parent / name)


def view_box(svg: str) -> str:
    """Return `left top width height` of a figure's drawing."""
    found = re.search(r'viewBox="([^"]*)"', svg)
    assert found is not None  # matplotlib writes one
    return found[1]


def check_drawing(svg: str) -> None:
    """Raise ValueError for what no figure of ours holds and a browser may act on: other elements
    and attributes, links to anything but a part of the drawing.
    """
    if "<!" in svg or "<?" in svg:
        raise ValueError("it holds a declaration")
    try:
        elements = list(ElementTree.fromstring(svg).iter())
    except ElementTree.ParseError as error:
        raise ValueError(f"it is not one SVG element ({error})") from None
    for element in elements:
        name = element.tag.removeprefix(SVG)
        if name not in ELEMENTS:
            raise ValueError(f"it holds an element <{name}>")
        for attribute, value in element.attrib.items():
            key = attribute.removeprefix(XLINK)
            if key not in ATTRIBUTES:
                raise ValueError(f"it holds an attribute {key}")
            linked = key == "href" and not value.startswith(("#", "data:image/png;base64,"))
            if linked or FOREIGN_VALUE.search(value):
                raise ValueError(f"it links to {value[:40]}")


def inline(svg: str, prefix: str, css_class: str) -> str:
    """Return the `<svg>` element of a figure for inlining, with `prefix` before each id that the
    element refers to. Raises ValueError as `check_drawing` does.
    """
    unseen = r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<title>.*?</title>"
    drawing = re.sub(unseen, "", svg[svg.index("<svg") :], flags=re.DOTALL)
    check_drawing(drawing)
    head, body = drawing.split(">", 1)
    box = view_box(head)
    body = body.replace("xlink:href=", "href=")
    used = {name for pair in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', body) for name in pair}
    body = re.sub(
        r' id="([^"]*)"',
        lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "",
        body,
    )
    body = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", body)
    for name, colour in (
        ("currentColor", TEXT),
        *((f"var(--c{i})", c) for i, c in enumerate((GRID, *PALETTE))),
    ):
        body = re.sub(colour, name, body, flags=re.IGNORECASE)
    body = re.sub(r"\n\s*", "\n", body)
    body = re.sub(
        r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), body
    )
    return f'<svg class="{css_class}" viewBox="{box}" aria-hidden="true">{body.strip()}'


#: elements that matplotlib writes into a drawing, but for its own style and metadata
ELEMENTS = {"svg", "defs", "g", "path", "use", "clipPath", "rect", "image", "text", "tspan"}
ELEMENTS |= {"pattern", "linearGradient", "stop"}
ATTRIBUTES = {"clip-path", "d", "fill", "height", "href", "id", "offset", "patternUnits", "style"}
ATTRIBUTES |= {"gradientUnits", "transform", "version", "viewBox", "width", "x", "x1", "x2", "y"}
ATTRIBUTES |= {"y1", "y2"}
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
#: what a style would load from elsewhere, or write so that this does not see it
FOREIGN_VALUE = re.compile(r"(?i)(?:url|src|image|image-set)\s*\((?!#)|\\|@")
#: replaced by `currentColor` and by the page's grid colour when a figure is put into HTML
TEXT = "#1b1e23"
GRID = "#d3d6da"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7a7f87")
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY = PALETTE

#: approach → colour, marker, dash, filled
APPROACHES = {
    "padded": (RED, "o", "--", False),
    "pretokenized-padded": (ORANGE, "s", "-", True),
    "padding-free": (GREEN, "^", "--", False),
    "token-list": (SKY, "D", "-", True),
    "packed": (BLUE, "v", "-", True),
    "length-bucketed": (PURPLE, "p", "-", True),
    "memcpy": (GREY, "x", ":", True),
}
#: schedule of a pipeline → colour, marker, dash
SCHEDULES = {
    "naive": (GREY, "X", "-"),
    "gpipe": (ORANGE, "s", "-"),
    "1f1b": (BLUE, "o", "--"),
    "interleaved": (GREEN, "^", "-"),
    "zero-bubble": (RED, "D", "-"),
}
#: what tells lines apart that no approach does: world sizes, layouts, models
_MARKERS = "os^DvPX*"
_DASHES = ("-", "--", "-.", ":")
_MORE = ((PURPLE, "P", "-.", True), (GREY, "X", ":", True))

#: runs over stacked bars
OPEN_DOTS: dict = {
    "color": TEXT,
    "marker": "o",
    "markersize": 3.5,
    "markerfacecolor": "white",
    "linestyle": "none",
}

RC: dict = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenscale",
    "pdf.fonttype": 42,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "font.family": [FAMILY, "sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 10),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), TEXT
    ),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(
        ("legend.frameon", "axes.spines.top", "axes.spines.right", "path.simplify"), False
    ),
    **dict.fromkeys(("axes.formatter.use_mathtext", "axes.unicode_minus"), False),
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
}


_styled = False


@contextmanager
def style() -> Iterator[None]:
    """Context for drawing and saving, independent of the user's matplotlib settings. A nested
    context does nothing.
    """
    global _styled
    if _styled:
        yield
        return
    register()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        _styled = True
        try:
            yield
        finally:
            _styled = False


def figure(
    columns: int = 1, *, rows: int = 1, height: float = 3.6, **options
) -> tuple[Figure, list[Axes]]:
    """Return a figure without pyplot's global state, and its axes. It is 8 inches wide, or as wide
    as a phone (`narrow`).
    """
    if text_layout.width < text_layout.WIDE:
        height *= columns
        rows *= columns
        columns = 1
        options = {key: value is True for key, value in options.items() if key.startswith("share")}
    made = Figure(figsize=(text_layout.width, height), layout="constrained")
    return made, list(made.subplots(rows, columns, squeeze=False, **options).flat)


@contextmanager
def narrow() -> Iterator[None]:
    """Context in which figures are as wide as a phone, with their panels below each other."""
    text_layout.width = text_layout.NARROW
    try:
        yield
    finally:
        text_layout.width = text_layout.WIDE


def settle(made: Figure) -> None:
    """Lay a figure out once and for all: with a layout engine, each save would draw it twice."""
    engine = made.get_layout_engine()
    assert engine is not None  # not settled before
    with style():
        text_layout.fit(made, layout=lambda: engine.execute(made))
        made.set_layout_engine(None)


def look(name: str) -> dict:
    """Return line and marker options of an approach or arm. Those of an unknown name depend on its
    letters.
    """
    colour, marker, dash, filled = (
        APPROACHES.get(_approach(name)) or _MORE[sum(map(ord, name)) % len(_MORE)]
    )
    return _options(
        colour,
        marker,
        dash=dash,
        face=colour if filled else "none",
    )


def looks(names: Sequence[str]) -> dict[str, dict]:
    """Return name → options like those of `look`, all different: by approach if each name has
    another approach, else in the given order.
    """
    if len({_approach(name) for name in names}) == len(names) and set(map(_approach, names)) <= set(
        APPROACHES
    ):
        return {name: look(name) for name in names}
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    dashes = [_DASHES[(i // len(PALETTE) + i) % len(_DASHES)] for i in range(len(names))]
    each = zip(names, colours, itertools.cycle(_MARKERS), dashes, strict=False)
    return {
        name: _options(
            colour,
            marker,
            dash=dash,
            face=colour,
        )
        for name, colour, marker, dash in each
    }


def _options(colour: str, marker: str, dash: str, face: str) -> dict:
    look = {
        "color": colour,
        "marker": marker,
        "linestyle": dash,
        "markerfacecolor": face,
        "markeredgecolor": colour,
    }
    return look | {"markeredgewidth": 1.4}


def _approach(series: str) -> str:
    return series.split(",", maxsplit=1)[0]


def is_online(name: str) -> bool:
    """Return whether an approach tokenizes during training. Its line is drawn thin and dashed over
    the line of its offline counterpart.
    """
    return look(name)["markerfacecolor"] == "none"


def dots(name: str) -> dict:
    """Return `look` without a line."""
    return look(name) | {"linestyle": "none"}


def order_series(names: Sequence[str]) -> list[str]:
    """Return distinct series in the order of the palette; unknown ones come last, by name."""
    place = {name: i for i, name in enumerate(APPROACHES)}
    return sorted(
        {str(n) for n in names}, key=lambda name: (place.get(_approach(name), len(place)), name)
    )


def jitter(n: int, width: float = 0.28) -> list[float]:
    """Return even offsets, never random ones, that separate n points which would hide each other."""
    return [0.0] if n == 1 else [width * (i / (n - 1) - 0.5) for i in range(n)]


def legend_columns(names: Sequence[str], most: int) -> int:
    """Return the most columns, at most `most`, with which a legend of these names fits a figure (it
    is filled column by column).
    """
    for columns in range(min(most, len(names)), 1, -1):
        rows, longer = divmod(len(names), columns)
        ends = [i * rows + min(i, longer) for i in range(columns + 1)]
        parts = [names[begin:end] for begin, end in itertools.pairwise(ends)]
        if sum(0.6 + 0.075 * max(map(len, part)) for part in parts) <= text_layout.width:
            return columns
    return 1


#: significant digits of a tick at most
MOST_DIGITS = 12


class PlainNumbers(ticker.Formatter):
    """Numbers as people write them (20 000; 0.5), with as many digits as tell the ticks of an axis
    apart, at least three significant ones.
    """

    def __call__(self, value: float, pos: int | None = None) -> str:
        return number(value)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        digits = 3
        while digits < MOST_DIGITS and len({number(v, digits) for v in values}) < len(values):
            digits += 1
        return [number(value, digits) for value in values]


def format_ticks(axis, log: bool = False) -> None:
    """Format the numbers of a linear or logarithmic axis, see `PlainNumbers`."""
    axis.set_major_formatter(PlainNumbers())
    if log:
        low, high = axis.get_view_interval()
        subs = (1,) if high > 300 * low else (1, 2, 5)
        # of more than five decades every second is named: in a narrow panel they would write over
        # one another
        axis.set_major_locator(
            ticker.LogLocator(base=10, subs=subs, numticks=12 if high < 1e5 * low else 6)
        )
        axis.set_minor_locator(ticker.NullLocator())


def number(value: float, digits: int = 3) -> str:
    """Format a number with three significant digits; a narrow no-break space separates thousands.

    >>> number(0.01234), number(123456.0), number(2.0), number(pd.NA)
    ('0.0123', '123\\u202f000', '2', '–')
    """
    if pd.isna(value):
        return "–"
    text = f"{float(f'{value:.{digits}g}'):,.12f}".rstrip("0").rstrip(".") if value else "0"
    return text.replace(",", "\u202f").replace("-", "\u2212")


def no_data(axes: Axes, text: str) -> None:
    """Write in the frame that there is nothing to draw."""
    # not the ticks: panels beside it may share them
    axes.tick_params(labelbottom=False, labelleft=False)
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", style="italic")
