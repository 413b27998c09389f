"""Flags of a command line from a settings class: names, types, bounds, defaults and help are the schema's own.

Standard library only: a trainer's environment has no pydantic. A flag's text stays text until `stated` reads it, so
that a wrong value is told like every other mistake of a user's.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings.options import default_of

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: the dotted key of its setting, its spellings (the first is shown in messages), its type and words."""

    key: str
    names: tuple[str, ...]
    hint: Any
    metadata: Mapping[str, Any]
    default: Any = None

    @property
    def name(self) -> str:
        """As messages call it."""
        return self.names[0]


def leaves(
    cls: type, *, left_out: Iterable[str] = (), words: Mapping[str, tuple[str, ...]] | None = None
) -> list[Flag]:
    """A flag for each field of a settings class and of the classes in it: `optimizer.weight_decay` becomes
    `--optimizer.weight-decay`. Fields in `left_out` get none; `words` gives further spellings, which go first.

    >>> from tokenscale.settings.run import OptimizerSettings
    >>> [flag.name for flag in leaves(OptimizerSettings, words={"learning_rate": ("--lr",)})][:2]
    ['--lr', '--beta1']
    """
    return list(_leaves(cls, "", set(left_out), words or {}))


def _leaves(cls: type, prefix: str, left_out: set[str], words: Mapping[str, tuple[str, ...]]) -> Iterator[Flag]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if key in left_out:
            continue
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, f"{key}.", left_out, words)
        else:
            own = f"--{key.replace('_', '-')}"
            yield Flag(key, tuple(dict.fromkeys((*words.get(key, ()), own))), hint, field.metadata, default_of(field))


def add(parser: argparse.ArgumentParser | argparse._ArgumentGroup, flags: Iterable[Flag]) -> None:
    """Add the flags to a parser. Underscores are taken for dashes (`--batch_size`), without being shown."""
    for flag in flags:
        kind, _ = _plain(flag.hint)
        many = {"nargs": "+"} if kind is tuple else {"nargs": "?", "const": "true"} if kind is bool else {}
        shown = {"dest": flag.key, "default": None, "metavar": _metavar(flag), **many}
        parser.add_argument(*flag.names, help=_help(flag), **shown)
        hidden = [name.replace("-", "_").replace("__", "--", 1) for name in flag.names if "-" in name[2:]]
        if hidden:
            parser.add_argument(*hidden, help=argparse.SUPPRESS, **shown)


def stated(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Dotted key → value of the flags that were given. UserError: flag, value, what is allowed, nearest spelling."""
    found = {}
    for flag in flags:
        text = getattr(arguments, flag.key)
        if text is not None:
            many = isinstance(text, list)
            found[flag.key] = tuple(read(flag, t) for t in text) if many else read(flag, text)
    return found


def read(flag: Flag, text: str) -> Any:
    """The value that a flag's text stands for, within the field's bounds."""
    kind, choices = _plain(flag.hint)
    kind, choices = _plain(typing.get_args(flag.hint)[0]) if kind is tuple else (kind, choices)
    if text.lower() in ("none", "null") and text not in choices and _optional(flag.hint):
        return None
    if choices:
        if text not in choices:
            raise unknown(f"value of {flag.name}", text, choices)
        return text
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise _refused(flag, text, kind) from None
    if kind is float and not math.isfinite(value):
        raise _refused(flag, text, kind)
    checks = {
        "ge": lambda b: value >= b,
        "gt": lambda b: value > b,
        "le": lambda b: value <= b,
        "lt": lambda b: value < b,
    }
    if not all(check(flag.metadata[name]) for name, check in checks.items() if name in flag.metadata):
        raise _refused(flag, text, kind)
    return value


def changed(settings: Any, values: Mapping[str, Any]) -> Any:
    """A copy of settings with the values at dotted keys.

    >>> from tokenscale.settings.run import RunSettings
    >>> changed(RunSettings(), {"seed": 3, "optimizer.beta1": 0.8}).optimizer.beta1
    0.8
    """
    own = {key: value for key, value in values.items() if "." not in key}
    for name in dict.fromkeys(key.split(".")[0] for key in values if "." in key):
        inner = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = changed(getattr(settings, name), inner)
    return dataclasses.replace(settings, **own)


def _plain(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """(type, allowed words) of a field's type, None left out of it."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _plain(next(h for h in typing.get_args(hint) if h is not type(None)))
    if origin is typing.Literal:
        return str, typing.get_args(hint)
    return (tuple, ()) if origin is tuple else (hint, ())


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _refused(flag: Flag, text: str, kind: type) -> UserError:
    return UserError(
        f"{flag.name} has no value {text!r}.",
        flag=flag.name,
        expected=_expected(flag, kind),
        next=f"give {flag.name} a value as expected",
    )


def _expected(flag: Flag, kind: type) -> str:
    word = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
    bounds = ", ".join(f"{sign} {flag.metadata[name]}" for name, sign in SIGNS.items() if name in flag.metadata)
    return f"{word} {bounds}".strip() + (", or none" if _optional(flag.hint) else "")


def _metavar(flag: Flag) -> str:
    kind, choices = _plain(flag.hint)
    kind, choices = _plain(typing.get_args(flag.hint)[0]) if kind is tuple else (kind, choices)
    if choices:
        return "{" + ",".join(choices) + "}"
    return flag.metadata.get("metavar") or {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kind]


def _help(flag: Flag) -> str:
    text = flag.metadata.get("description", "")
    if flag.default not in (None, "", dataclasses.MISSING):
        shown = " ".join(flag.default) if isinstance(flag.default, tuple) else str(flag.default)
        text += f" (default {shown.lower() if isinstance(flag.default, bool) else shown})"
    return text.replace("%", "%%")
