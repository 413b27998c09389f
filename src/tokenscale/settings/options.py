"""Settings are frozen stdlib dataclasses; this is what they share.

The trainer reads them without pydantic; on the host pydantic validates the same classes (`validate.py`), reading the
description and the bounds from each field's metadata.
"""

import dataclasses
import functools
import json
import types
import typing
from typing import Any

from tokenscale.base.errors import UserError, unknown

#: what becomes a folder, a target of the workflow, a job's name or a word of a shell: nothing there has a meaning
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAME_IN_WORDS = "letters, digits, dot, dash and underscore, the first a letter or a digit, at most 100 (no accents)"
#: what mends settings that were passed on as JSON
AGAIN = "pass them on as a run table or a rule has them"
#: Read by pydantic when it validates a settings class; means nothing to anybody else.
STRICT = {"extra": "forbid", "use_attribute_docstrings": False}


def option(default: Any = dataclasses.MISSING, description: str = "", *, science: bool = True, **bounds: Any) -> Any:
    """A settings field: default, one sentence for people, and bounds (`ge`, `gt`, `le`, `lt`, `pattern`).

    `science=False` marks what never enters a run's identity (names and labels).
    """
    metadata = {"description": description, "science": science, **bounds}
    if isinstance(default, type):  # a class: every object gets its own empty one
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field) -> Any:
    """What a field holds where nothing is stated; dataclasses.MISSING for a field that must be."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_dict(settings: Any, *, science_only: bool = False) -> dict[str, Any]:
    """Nested plain values of a settings object, without the fields that equal their default.

    Leaving defaults out keeps the identity of old runs when a new option appears. `science_only` also leaves out
    names and labels.
    """
    result = {}
    for name, default, science, optional in _fields(type(settings)):
        value = getattr(settings, name)
        if (science_only and not science) or value == default:
            continue
        if not dataclasses.is_dataclass(value):
            result[name] = _plain(value)
            continue
        inner = to_dict(value, science_only=science_only)
        if inner or optional:  # empty: only labels differ from the default
            result[name] = inner
    return result


@functools.cache  # asked for every object of every run, and only ever compared with
def _fields(cls: type) -> tuple[tuple[str, Any, bool, bool], ...]:
    """(name, default, whether it is science, whether the default is None) of each field of a settings class."""
    return tuple(
        (field.name, default_of(field), field.metadata.get("science", True), field.default is None)
        for field in dataclasses.fields(cls)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def from_json(cls: type, text: str) -> Any:
    """A settings object from the JSON that a rule or a person passes on the command line.

    Raises UserError for text that is no JSON object, keys that do not exist and values of another type. Their bounds
    are not checked here: the host has validated them with pydantic, which the trainer does not need.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError("the settings are not readable JSON.", found=text[:200], reason=error, next=AGAIN) from None
    return from_dict(cls, values)


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """A settings object from nested plain values that were validated before. Raises UserError for an unknown key, and
    for values of another shape."""
    if not isinstance(values, dict):
        found = repr(values)[:200]
        raise UserError(f"{cls.__name__} is no object.", found=found, expected='{"key": value, …}', next=AGAIN)
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise unknown(f"key of {cls.__name__}", name, names)
    try:
        return cls(**{name: _build(hints[name], value) for name, value in values.items()})
    except TypeError as error:  # a field without a default is missing, or a list is none
        raise UserError(f"{cls.__name__} cannot be made of these values.", reason=error, next=AGAIN) from None


def _build(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        return _build(hint, value)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} is no list")
        return tuple(_build(typing.get_args(hint)[0], v) for v in value)
    if origin is typing.Literal and value not in typing.get_args(hint):
        raise TypeError(f"{value!r} is none of {', '.join(map(repr, typing.get_args(hint)))}")
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}.get(hint)
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value
