"""Shared helpers of the settings classes, which are frozen stdlib dataclasses.

The trainer reads settings without pydantic. On the host pydantic validates the same classes (`yaml_files.py`) and reads
descriptions and bounds from the metadata of the fields.
"""

import dataclasses
import functools
import json
import types
import typing
from typing import Any

from tokenscale.base.errors import UserError, unknown

#: names of folders, workflow targets and jobs: no character is special to a file system or a shell
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAME_RULE = "letters, digits, dot, dash and underscore, the first a letter or a digit, at most 100 (no accents)"
#: next step for an error in settings passed as JSON
RETRY_HINT = "copy the JSON from a run table or a workflow rule"
#: pydantic's configuration of a settings class; ignored without pydantic
STRICT = {"extra": "forbid", "use_attribute_docstrings": False}


def option(default: Any = dataclasses.MISSING, description: str = "", *, science: bool = True, **bounds: Any) -> Any:
    """Return a dataclass field with default, description and bounds. `science=False`: it never affects a run's id."""
    metadata = {"description": description, "science": science, **bounds}
    if isinstance(default, type):  # a class is used as default factory
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def get_default(field: dataclasses.Field) -> Any:
    """Return a field's default; dataclasses.MISSING for a required field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_dict(settings: Any, *, science_only: bool = False) -> dict[str, Any]:
    """Return a settings object as nested plain values, without fields that equal their default.

    Leaving out defaults keeps the ids of old runs when an option is added. `science_only` also leaves out names and
    labels.
    """
    result = {}
    for name, default, science, optional in _fields(settings.__class__):
        value = getattr(settings, name)
        if (science_only and not science) or value == default:
            continue
        if not dataclasses.is_dataclass(value):
            result[name] = _to_plain(value, science_only)
            continue
        inner = to_dict(value, science_only=science_only)
        if inner or optional:  # empty: only labels differ from the default
            result[name] = inner
    return result


@functools.cache  # called for every object of every run; the defaults are only compared
def _fields(cls: type) -> tuple[tuple[str, Any, bool, bool], ...]:
    """Return (name, default, whether it is science, whether the default is None) of each field."""
    return tuple(
        (field.name, get_default(field), field.metadata.get("science", True), field.default is None)
        for field in dataclasses.fields(cls)
    )


def _to_plain(value: Any, science_only: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_plain(v, science_only) for v in value]
    return to_dict(value, science_only=science_only) if dataclasses.is_dataclass(value) else value


def from_json(cls: type, text: str) -> Any:
    """Return a settings object from JSON passed on a command line.

    Raises UserError for text that is not a JSON object, unknown keys and values of a wrong type. Bounds are not
    checked: the host has validated them with pydantic, which the trainer does not need.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "the settings are not readable JSON.", found=text[:200], reason=error, next=RETRY_HINT
        ) from None
    return from_dict(cls, values)


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Return a settings object from validated plain values. Raises UserError for unknown keys and wrong types."""
    if not isinstance(values, dict):
        found = repr(values)[:200]
        raise UserError(
            f"{cls.__name__} is not a JSON object.", found=found, expected='{"key": value, …}', next=RETRY_HINT
        )
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise unknown(f"key of {cls.__name__}", name, names)
    try:
        return cls(**{name: _from_plain(hints[name], value) for name, value in values.items()})
    except TypeError as error:  # a required field is missing, or a value has a wrong type
        raise UserError(f"{cls.__name__} has missing or wrong values.", reason=error, next=RETRY_HINT) from None


def _from_plain(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        return _from_plain(hint, value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_dict(hint, value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} is not a list")
        return tuple(_from_plain(typing.get_args(hint)[0], v) for v in value)
    if origin is typing.Literal and value not in typing.get_args(hint):
        raise TypeError(f"{value!r} is not one of {', '.join(map(repr, typing.get_args(hint)))}")
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}.get(hint)
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return value
