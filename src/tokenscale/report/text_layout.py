"""Long names in figures: wrapped or cut where they would leave no room, and ticks thinned where
they would overlap.
"""

import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

#: inches: width of a figure, and of its drawing for a phone (`style.narrow`); of those that are
#: being drawn
WIDE = 8.0
NARROW = 4.4
width = WIDE
#: letters of a line of a row's name, by the figure's width, and its lines; letters of a line of a
#: legend's only column
LETTERS = {WIDE: 34, NARROW: 26}
LINES = 2
ENTRY = 95
#: inches: only in a panel as narrow as this can ticks of a wide figure overlap
TIGHT = 2.6
#: pixels between two ticks, and between a text and the figure's edge
APART = 3.0


def wrap_names(texts: Sequence[str]) -> list[str]:
    """Wrap names of rows on at most `LINES` lines. Longer names lose their middle, unless two names
    would then be equal.

    >>> wrap_names(["packed", "padded, optimizer.learning_rate_schedule=cosine"])
    ['packed', 'padded,\\noptimizer.learning_rate_schedule=cosine']
    """
    options: dict = {"width": LETTERS[width], "break_on_hyphens": False, "break_long_words": False}
    lines = [textwrap.wrap(text, **options) for text in texts]
    # what tells most names apart
    short = [own if len(own) <= LINES else [f"{own[0]} …", own[-1]] for own in lines]
    return [
        "\n".join(own)
        for own in (short if len(set(map(tuple, short))) == len(set(texts)) else lines)
    ]


def wrap_entries(texts: Sequence[str]) -> list[str]:
    """Wrap names of a legend."""
    return ["\n".join(textwrap.wrap(text, int(ENTRY * width / WIDE))) for text in texts]


def fit(made: Figure, layout: Callable[[], None]) -> None:
    """Lay the figure out, wrap texts that extend beyond it, thin overlapping ticks, and lay it out
    again.
    """
    layout()
    shown = [axes for axes in made.axes if axes.get_visible()]
    texts = [
        text
        for axes in shown
        for text in (*axes.get_children(), axes.xaxis.label)
        if isinstance(text, Text)
    ]
    whole = {
        text: text.get_text() for text in texts if text.get_visible() and text.get_text().strip()
    }
    tight = TIGHT if width == WIDE else width
    for _ in range(3):  # other widths of panels leave other room
        wrapped = [
            _wrap_text(text, whole=whole[text], end=_find_end(text, others=whole, made=made))
            for text in whole
        ]
        thinned = [
            _thin_ticks(axes)
            for axes in shown
            if axes.get_position().width * made.get_figwidth() < tight
        ]
        if not any(wrapped) and not any(thinned):
            return
        layout()


def _find_end(text: Text, others: Iterable[Text], made: Figure) -> float:
    """Return where a text has to end: at the figure's edge, or where the heading of the next panel
    begins.
    """
    box = text.get_window_extent()
    boxes = (
        other.get_window_extent()
        for other in others
        if other is not text and other.axes is not text.axes
    )
    beside = (b.x0 for b in boxes if b.x0 > box.x0 and b.y0 < box.y1 and box.y0 < b.y1)
    return min(beside, default=made.bbox.width) - APART


def _wrap_text(text: Text, whole: str, end: float) -> bool:
    """Wrap a text that extends beyond `end` or to the left of the figure. Return whether it
    changed.
    """
    before = text.get_text()
    letters = max(map(len, before.split("\n")))
    while letters > 8:
        box = text.get_window_extent()
        if box.x0 >= APART and box.x1 <= end:
            break
        middle = (box.x0 + box.x1) / 2
        rooms = {"left": end - box.x0, "right": box.x1 - APART}
        room = rooms.get(text.get_horizontalalignment(), 2 * min(end - middle, middle - APART))
        letters = max(8, min(int(letters * room / box.width), letters - 1))
        text.set_text("\n".join(textwrap.wrap(whole, letters)))
    return text.get_text() != before


def _thin_ticks(axes: Axes) -> bool:
    """Reduce the numbers along the panel until none overlap. Return whether any were removed."""
    most = 4 if isinstance(axes.xaxis.get_major_locator(), MaxNLocator) else 0
    before = most
    while most > 1:
        low, high = sorted(axes.get_xlim())
        shown = zip(axes.get_xticks(), axes.get_xticklabels(), strict=False)
        boxes = [
            label.get_window_extent()
            for place, label in shown
            if low <= place <= high and label.get_text()
        ]
        if all(a.x1 + APART <= b.x0 for a, b in itertools.pairwise(boxes)):
            break
        most -= 1
        axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    return most < before
