"""Numbers, times and lists in sentences for people."""

import math
from collections.abc import Iterable
from textwrap import wrap


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun.

    >>> count(1, "run"), count(2000, "run"), count(0, "batch"), count(2, "corpus", "corpora")
    ('1 run', '2,000 runs', '0 batches', '2 corpora')
    """
    if number != 1:
        noun = plural or noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun}"


def listing(words: Iterable[object], conjunction: str = "and") -> str:
    """Join words as in a sentence: `a, b and c`."""
    *most, last = [str(word) for word in words] or [""]
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def wrap_text(start: str, text: str, width: int, indent: int | None = None) -> list[str]:
    """Wrap `text` behind `start`; further lines are indented as far, or by `indent`. No run id or
    option is broken.
    """
    room = " " * (len(start) if indent is None else indent)
    return wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=room,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_duration(seconds: float) -> str:
    """Format a time in its two largest units.

    >>> [format_duration(s) for s in (0.2, 7.4, 90, 3600, 3 * 3600 + 12 * 60, 60 * 3600)]
    ['under 1 s', '7 s', '1 min 30 s', '1 h', '3 h 12 min', '2 d 12 h']
    """
    for large, size, small, part in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {large}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"


def format_number(value: float) -> str:
    """Format a number with three significant digits, and all digits before the point.

    >>> format_number(0.004567), format_number(18.2), format_number(12345.6), format_number(0)
    ('0.00457', '18.2', '12,346', '0')
    """
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def format_bytes(count: int) -> str:
    """Format a number of bytes with three significant digits.

    >>> format_bytes(999), format_bytes(1536), format_bytes(3 << 30), format_bytes(1000 << 10)
    ('999 B', '1.50 KiB', '3.00 GiB', '1,000 KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{format_number(count / (1 << 10 * power)) if power else count} {units[power]}"
