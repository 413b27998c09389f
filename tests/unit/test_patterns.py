"""Patterns that read texts of others take time in proportion to the text.

Texts are spelled along each pattern: to one of its repeats, which goes on for 50,000 characters and
then breaks off; and many such beginnings in a row. A pattern that tries each end of each beginning
needs 10⁹ steps for one of them.
"""

import ast
import inspect
import itertools
import random
import re
import signal
from collections.abc import Iterator
from re import _constants, _parser
from types import ModuleType

import pytest

from tokenscale.base import errors
from tokenscale.runs.records import redaction
from tokenscale_golden import reading

LENGTH = 50_000
#: seconds of the processor for one text; a linear pattern takes some milliseconds
LIMIT_S = 5.0
SPELLINGS = 40
TEXTS = 120
#: one character of each kind that patterns tell apart
CHARACTERS = " \ta1Z_-.:='\"/@{$,\n+(%"
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
CATEGORIES = {
    _constants.CATEGORY_DIGIT: str.isdigit,
    _constants.CATEGORY_SPACE: str.isspace,
    _constants.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    _constants.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
}


def list_patterns(module: ModuleType) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the patterns of a module, compiled or within a call."""
    for name, value in vars(module).items():
        if isinstance(value, re.Pattern):
            yield name, value
        elif isinstance(getattr(value, "__self__", None), re.Pattern):
            whole = rf"\A(?:{value.__self__.pattern})\Z"
            yield name, re.compile(whole, value.__self__.flags)
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if (
            isinstance(call, ast.Call)
            and ast.unparse(call.func).startswith("re.")
            and call.func.attr in ("sub", "search", "fullmatch", "findall")
            and isinstance(call.args[0], ast.Constant)
        ):
            pattern = call.args[0].value
            whole = rf"\A(?:{pattern})\Z" if call.func.attr == "fullmatch" else pattern
            yield f"{call.func.attr} {pattern}", re.compile(whole)


PATTERNS = {
    f"{module.__name__.rpartition('.')[2]} {name}": pattern
    for module in (reading, redaction, errors)
    for name, pattern in list_patterns(module)
}


def is_in(letter: str, members: list) -> bool:
    """Whether a letter is in a class of characters."""
    found = False
    for kind, value in members:
        if kind is _constants.LITERAL:
            found |= ord(letter) == value
        elif kind is _constants.RANGE:
            found |= value[0] <= ord(letter) <= value[1]
        elif kind is _constants.CATEGORY:
            found |= CATEGORIES[value](letter)
    return found is not (members[0][0] is _constants.NEGATE)


def spell(parsed, draw: random.Random, pumps: list[tuple[str, str]], before: str = "") -> str:
    """Return `before` and a text along a pattern; adds (beginning, what repeats) to `pumps`."""
    for kind, value in parsed:
        if kind is _constants.LITERAL:
            before += chr(value)
        elif kind in (_constants.NOT_LITERAL, _constants.ANY):
            before += draw.choice("a{")
        elif kind is _constants.IN:
            fitting = [letter for letter in CHARACTERS if is_in(letter, value)]
            before += draw.choice(fitting or [chr(value[0][1])])
        elif kind is _constants.BRANCH:
            before = spell(draw.choice(value[1]), draw, pumps, before)
        elif kind is _constants.SUBPATTERN:
            before = spell(value[-1], draw, pumps, before)
        elif kind is _constants.ATOMIC_GROUP:
            before = spell(value, draw, pumps, before)
        elif kind in REPEATS:
            low, high, item = value
            body = spell(item, draw, [])
            if high > 1:
                pumps.append((before, body))
            for _ in range(min(high, low + draw.randrange(2))):
                before = spell(item, draw, pumps, before)
    return before


def list_texts(pattern: re.Pattern[str]) -> list[str]:
    draw = random.Random(pattern.pattern)
    texts = set()
    for _ in range(SPELLINGS):
        pumps: list[tuple[str, str]] = []
        whole = spell(_parser.parse(pattern.pattern), draw, pumps)
        parts = [*pumps, (whole, "")]
        for (head, body), (_, other) in itertools.product(parts, parts[:4]):
            end = draw.choice(["", "!", "\n!", "x"])
            texts.add(head + body * (LENGTH // max(1, len(body))) + end)
            both = head + body * 8 + other
            texts.add(both * (LENGTH // max(1, len(both))) + end)
    return draw.sample(sorted(texts), min(TEXTS, len(texts)))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_in_proportion_to_the_text(name):
    pattern = PATTERNS[name]

    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        for text in list_texts(pattern):
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            try:
                pattern.sub("", text)
            except TimeoutError:
                pytest.fail(f"{pattern.pattern} on {text[:60]!r} … {text[-20:]!r}")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, previous)
