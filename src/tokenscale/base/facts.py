"""Facts that could not be had: `unknown: why` stands in a record in their place."""

from collections.abc import Iterator
from typing import Any

_MARK = "unknown: "


def unknown_fact(why: str) -> str:
    """Return what stands in a record for a fact that could not be had.

    >>> unknown_fact("git is not installed")
    'unknown: git is not installed'
    """
    return f"{_MARK}{why}"


def is_unknown(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_MARK)


def list_unknown(record: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, why) of the unknown facts in a record; names of keys are joined by dots.

    >>> list(list_unknown({"git": {"commit": "unknown: git is not installed"}}))
    [('git.commit', 'git is not installed')]
    """
    if isinstance(record, dict):
        for key, value in record.items():
            yield from list_unknown(value, name=f"{name}.{key}" if name else str(key))
    elif isinstance(record, list):
        for value in record:
            yield from list_unknown(value, name)
    elif isinstance(record, str) and is_unknown(record):
        yield name, record.removeprefix(_MARK)


def clear_unknown(record: Any) -> Any:
    """Return a record with None in place of each unknown fact, for readers of values."""
    if isinstance(record, dict):
        return {key: clear_unknown(value) for key, value in record.items()}
    if isinstance(record, list):
        return [clear_unknown(value) for value in record]
    return None if is_unknown(record) else record
