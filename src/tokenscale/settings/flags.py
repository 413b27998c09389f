"""Command-line flags derived from a settings class: names, types, bounds, defaults and help.

Standard library only: a trainer's environment has no pydantic. argparse keeps each value as text and `parse_flags`
converts it, so that a wrong value raises a UserError.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings.options import get_default

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """Command-line flag: key of the setting, spellings (the first one is used in messages), type and metadata."""

    key: str
    names: tuple[str, ...]
    hint: Any
    metadata: Mapping[str, Any]
    default: Any = None

    @property
    def name(self) -> str:
        return self.names[0]


def build_flags(
    cls: type, *, left_out: Iterable[str] = (), aliases: Mapping[str, tuple[str, ...]] | None = None
) -> list[Flag]:
    """Return a flag for each field of a settings class and of nested classes.

    `optimizer.weight_decay` becomes `--optimizer.weight-decay`. Fields in `left_out` get no flag. `aliases` are further
    spellings, which take precedence in messages.

    >>> from tokenscale.settings.run import OptimizerSettings
    >>> [flag.name for flag in build_flags(OptimizerSettings, aliases={"learning_rate": ("--lr",)})][:2]
    ['--lr', '--beta1']
    """
    return list(_iterate_flags(cls, "", set(left_out), aliases or {}))


def _iterate_flags(
    cls: type, prefix: str, left_out: set[str], aliases: Mapping[str, tuple[str, ...]]
) -> Iterator[Flag]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if key in left_out:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _iterate_flags(hint, f"{key}.", left_out, aliases)
        else:
            own = f"--{key.replace('_', '-')}"
            yield Flag(
                key, tuple(dict.fromkeys((*aliases.get(key, ()), own))), hint, field.metadata, get_default(field)
            )


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, flags: Iterable[Flag]) -> None:
    """Add flags to a parser. Spellings with underscores (`--batch_size`) are accepted, but hidden from the help."""
    for flag in flags:
        kind, _ = _type_and_choices(flag.hint)
        many = {"nargs": "+"} if kind is tuple else {"nargs": "?", "const": "true"} if kind is bool else {}
        shown: dict[str, Any] = {"dest": flag.key, "default": None, "metavar": _metavar(flag), **many}
        parser.add_argument(*flag.names, help=_help_text(flag), **shown)
        hidden = [name.replace("-", "_").replace("__", "--", 1) for name in flag.names if "-" in name[2:]]
        if hidden:
            parser.add_argument(*hidden, help=argparse.SUPPRESS, **shown)


def parse_flags(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Return dotted key → value of the flags that were given. Raises UserError for an invalid value."""
    found = {}
    for flag in flags:
        text = getattr(arguments, flag.key)
        if text is not None:
            many = isinstance(text, list)
            found[flag.key] = tuple(parse_value(flag, t) for t in text) if many else parse_value(flag, text)
    return found


def parse_value(flag: Flag, text: str) -> Any:
    """Parse a flag's text and check its bounds. Raises UserError for an invalid value."""
    kind, choices = _type_and_choices(flag.hint)
    kind, choices = _type_and_choices(typing.get_args(flag.hint)[0]) if kind is tuple else (kind, choices)
    if text.lower() in ("none", "null") and text not in choices and _is_optional(flag.hint):
        return None
    if choices:
        if text not in choices:
            raise unknown(f"value of {flag.name}", text, choices)
        return text
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise _invalid_value(flag, text, kind) from None
    if kind is float and not math.isfinite(value):
        raise _invalid_value(flag, text, kind)
    checks = {
        "ge": lambda b: value >= b,
        "gt": lambda b: value > b,
        "le": lambda b: value <= b,
        "lt": lambda b: value < b,
    }
    if not all(check(flag.metadata[name]) for name, check in checks.items() if name in flag.metadata):
        raise _invalid_value(flag, text, kind)
    return value


def replace_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of settings with the values at dotted keys replaced."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in dict.fromkeys(key.split(".")[0] for key in values if "." in key):
        inner = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = replace_values(getattr(settings, name), inner)
    return dataclasses.replace(settings, **own)


def _type_and_choices(hint: Any) -> tuple[Any, tuple[str, ...]]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _type_and_choices(next(h for h in typing.get_args(hint) if h is not type(None)))
    if origin is typing.Literal:
        return str, typing.get_args(hint)
    return (tuple, ()) if origin is tuple else (hint, ())


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _invalid_value(flag: Flag, text: str, kind: type) -> UserError:
    return UserError(
        f"{flag.name} cannot be {text!r}.",
        flag=flag.name,
        expected=_describe_expected(flag, kind),
        next=f"correct the value of {flag.name}",
    )


def _describe_expected(flag: Flag, kind: type) -> str:
    word = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
    bounds = ", ".join(f"{sign} {flag.metadata[name]}" for name, sign in SIGNS.items() if name in flag.metadata)
    return f"{word} {bounds}".strip() + (", or none" if _is_optional(flag.hint) else "")


def _metavar(flag: Flag) -> str:
    kind, choices = _type_and_choices(flag.hint)
    kind, choices = _type_and_choices(typing.get_args(flag.hint)[0]) if kind is tuple else (kind, choices)
    if choices:
        return "{" + ",".join(choices) + "}"
    return flag.metadata.get("metavar") or {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kind]


def _help_text(flag: Flag) -> str:
    text = flag.metadata.get("description", "")
    if flag.default not in (None, "", dataclasses.MISSING):
        shown = " ".join(flag.default) if isinstance(flag.default, tuple) else str(flag.default)
        text += f" (default {shown.lower() if isinstance(flag.default, bool) else shown})"
    return text.replace("%", "%%")
