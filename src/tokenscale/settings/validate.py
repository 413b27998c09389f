"""Validation on the host: YAML values → settings, with pydantic's errors as UserErrors."""

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import pydantic

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.settings.data import unknown_format_error
from tokenscale.settings.options import NAME_PATTERN, NAME_RULE

#: file of the settings, or function from a dotted key to the file that sets it
File = str | Callable[[str], str]
#: pydantic's error types for an unknown key
UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


@cache
def type_adapter(cls: type) -> pydantic.TypeAdapter:
    """Return pydantic's validator of a settings class, cached because building one is slow."""
    return pydantic.TypeAdapter(cls)


def build(cls: type, values: Any, *, file: File, key: str = "") -> Any:
    """Return a settings object from plain values. Raises UserError for invalid ones."""
    try:
        return type_adapter(cls).validate_python(values)
    except pydantic.ValidationError as error:
        raise _explain(cls, error, file, key) from None


def check_problems(problems: list[tuple[str, str]], *, file: File, key: str = "") -> None:
    """Raise UserError for the first problem, if there is any."""
    for field, text in problems:
        raise UserError(
            "the settings do not fit together.",
            file=_resolve_file(file, _join_key(key, field)),
            key=_join_key(key, field),
            reason=text,
            next="change this key, or the one that it conflicts with",
        )


def _resolve_file(file: File, key: str) -> str:
    return file(key) if callable(file) else file


def _explain(cls: type, error: pydantic.ValidationError, file: File, key: str) -> UserError:
    found = error.errors()
    # a misspelt key is also reported as missing
    first = next((entry for entry in found if entry["type"] in UNKNOWN_KEY), found[0])
    where = _join_key(key, *first["loc"])
    file = _resolve_file(file, where)
    more = f"{len(found) - 1} more errors in this file" if len(found) > 1 else None
    if first["type"] in UNKNOWN_KEY:
        fields = _list_fields(cls, first["loc"][:-1])
        near = find_nearest(str(first["loc"][-1]), fields)
        return UserError(
            f"unknown key {first['loc'][-1]!r}.",
            file=file,
            key=where,
            allowed=", ".join(fields),
            also=more,
            next=f"did you mean {near!r}?" if near else "remove it, or use one of the allowed keys",
        )
    if first["type"] in ("missing", "missing_argument"):
        return UserError("a key is missing.", file=file, key=where, also=more, next="add it")
    expected = first.get("ctx", {}).get("expected")
    near = None
    if expected and isinstance(first["input"], str):
        near = find_nearest(first["input"], expected.replace(" or ", ", ").replace("'", "").split(", "))
    if first["input"] == "archive" and "formats" in first["loc"]:
        return unknown_format_error("archive", file=file, key=where)
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    message = message.replace("a valid tuple", "a list")
    if first.get("ctx", {}).get("pattern") == NAME_PATTERN:
        message = NAME_RULE
    return UserError(
        f"{where or 'the file'} cannot be {first['input']!r}.",
        file=file,
        key=where,
        expected=expected.replace("'", "") if expected else message,
        also=more,
        next=f"did you mean {near!r}?" if near else "use an expected value",
    )


def _join_key(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if str(part))


def _list_fields(cls: type, location: tuple) -> list[str]:
    for part in location:
        if (origin := typing.get_origin(cls)) in (dict, tuple):
            cls = typing.get_args(cls)[origin is dict]
            continue
        hint = typing.get_type_hints(cls).get(part) if dataclasses.is_dataclass(cls) else None
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((h for h in typing.get_args(hint) if dataclasses.is_dataclass(h)), None)
        if hint is None:
            return []
        cls = hint
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
