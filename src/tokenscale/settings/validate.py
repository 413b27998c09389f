"""pydantic on the host: YAML values → settings, and its findings as errors for people."""

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import pydantic

from tokenscale.base.errors import UserError, nearest
from tokenscale.settings.options import NAME, NAME_IN_WORDS

#: the file that holds the settings, or a function from a dotted key to the file that sets this key
File = str | Callable[[str], str]
#: pydantic's types of error for a key that a settings class does not have
UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


@cache
def adapter(cls: type) -> pydantic.TypeAdapter:
    """pydantic's validator of a settings class; made once, since making it costs more than a thousand uses."""
    return pydantic.TypeAdapter(cls)


def build(cls: type, values: Any, *, file: File, key: str = "") -> Any:
    """A settings object from plain values. Raises UserError: file, key, value, what is allowed, nearest spelling."""
    try:
        return adapter(cls).validate_python(values)
    except pydantic.ValidationError as error:
        raise _explain(cls, error, file, key) from None


def check_problems(problems: list[tuple[str, str]], *, file: File, key: str = "") -> None:
    """Raise the first of the problems that fields have with each other."""
    for field, text in problems:
        raise UserError(
            "the settings do not fit together.",
            file=_file_of(file, _dotted(key, field)),
            key=_dotted(key, field),
            reason=text,
            next="change it, or what it does not go with",
        )


def _file_of(file: File, key: str) -> str:
    return file(key) if callable(file) else file


def _explain(cls: type, error: pydantic.ValidationError, file: File, key: str) -> UserError:
    found = error.errors()
    # a misspelt key is also reported as a missing one
    first = next((one for one in found if one["type"] in UNKNOWN_KEY), found[0])
    where = _dotted(key, *first["loc"])
    file = _file_of(file, where)
    more = f"{len(found) - 1} more of this file" if len(found) > 1 else None
    if first["type"] in UNKNOWN_KEY:
        fields = _fields_at(cls, first["loc"][:-1])
        near = nearest(str(first["loc"][-1]), fields)
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
        near = nearest(first["input"], expected.replace(" or ", ", ").replace("'", "").split(", "))
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    message = message.replace("a valid tuple", "a list")
    if first.get("ctx", {}).get("pattern") == NAME:
        message = NAME_IN_WORDS
    return UserError(
        f"{where or 'the file'} has no value {first['input']!r}.",
        file=file,
        key=where,
        expected=expected.replace("'", "") if expected else message,
        also=more,
        next=f"did you mean {near!r}?" if near else "write one that is expected",
    )


def _dotted(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if str(part))


def _fields_at(cls: type, location: tuple) -> list[str]:
    """Names of the fields at a location inside nested settings."""
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
