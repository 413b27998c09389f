"""Command-line flags derived from a settings class: names, types, bounds, defaults and help.

argparse keeps each value as text. `parse_flags` decodes it by the rules of the setting.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from tokenscale.settings.options import EXPANDED_PATH, decode, get_default, replace_synonyms

#: metadata of a field that limits its values
BOUNDS = ("ge", "gt", "le", "lt", "min_length", "pattern", "strict")
NO_ALIASES: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Flag:
    """Command-line flag: key of the setting, spellings (the first one is used in messages), type
    and metadata.
    """

    key: str
    names: tuple[str, ...]
    hint: Any
    metadata: Mapping[str, Any]
    default: Any = None

    @property
    def name(self) -> str:
        return self.names[0]


def spell(key: str) -> str:
    """Return the flag of a setting: `eos_id` → `--eos-id`."""
    return f"--{key.replace('_', '-')}"


def build_flags(
    cls: type,
    *,
    left_out: Collection[str] = (),
    aliases: Mapping[str, tuple[str, ...]] = NO_ALIASES,
    prefix: str = "",
) -> list[Flag]:
    """Return a flag for each field of a settings class and of nested classes.

    `optimizer.weight_decay` becomes `--optimizer.weight-decay`. Fields in `left_out` get no flag.
    `aliases` are further spellings, which take precedence in messages. `prefix` is the key of a
    nested class, with a dot.

    >>> from tokenscale.settings.run import OptimizerSettings
    >>> [flag.name for flag in build_flags(OptimizerSettings, aliases={"learning_rate": ("--lr",)})][:2]
    ['--lr', '--beta1']
    """
    hints = typing.get_type_hints(cls)
    found = list[Flag]()
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        hint = hints[field.name]
        if key in left_out:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found += build_flags(hint, left_out=left_out, aliases=aliases, prefix=f"{key}.")
        else:
            names = tuple(dict.fromkeys((*aliases.get(key, ()), spell(key))))
            found.append(
                Flag(
                    key=key,
                    names=names,
                    hint=hint,
                    metadata=field.metadata,
                    default=get_default(field),
                )
            )
    return found


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, flags: Iterable[Flag]
) -> None:
    """Add flags to a parser. Spellings with underscores (`--batch_size`) are accepted, but hidden
    from the help.
    """
    for flag in flags:
        boolean = {"nargs": "?", "const": "true"} if _item_type(flag.hint)[0] is bool else {}
        many = {"nargs": "+"} if typing.get_origin(flag.hint) is tuple else boolean
        shown: dict[str, Any] = {
            "dest": flag.key,
            "default": None,
            "metavar": _metavar(flag),
            **many,
        }
        parser.add_argument(*flag.names, help=_help_text(flag), **shown)
        hidden = [
            name.replace("-", "_").replace("__", "--", 1) for name in flag.names if "-" in name[2:]
        ]
        if hidden:
            parser.add_argument(*hidden, help=argparse.SUPPRESS, **shown)


def parse_flags(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Return dotted key → value of the flags that were given. Raises UserError for an invalid
    value.
    """
    found = {}
    for flag in flags:
        text = getattr(arguments, flag.key)
        if text is not None:
            many = isinstance(text, list)
            found[flag.key] = (
                tuple(parse_value(flag, text=t) for t in text) if many else parse_value(flag, text)
            )
    return found


def parse_value(flag: Flag, text: str) -> Any:
    """Parse a flag's text and check its bounds. Raises UserError for an invalid value. The name of
    an extension, `module:Name`, is left to whoever reads its folder.
    """
    import pydantic

    hint, choices = _item_type(flag.hint)
    if flag.metadata.get("extensions") and ":" in text:
        return text
    if (
        text.lower() in ("none", "null")
        and text not in choices
        and type(None) in typing.get_args(flag.hint)
    ):
        return None
    bounds = {name: bound for name, bound in flag.metadata.items() if name in BOUNDS}
    rules: list[Any] = [EXPANDED_PATH] if flag.metadata.get("path", False) else []
    rules += [replace_synonyms(found)] if (found := flag.metadata.get("synonyms")) else []
    return decode(
        Annotated[hint, pydantic.Field(**bounds), *rules],
        values=text,
        form="strings",
        key=flag.name,
        label="flag",
    )


def replace_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of settings with the values at dotted keys replaced."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in dict.fromkeys(key.split(".")[0] for key in values if "." in key):
        inner = {
            key.split(".", 1)[1]: value
            for key, value in values.items()
            if key.startswith(f"{name}.")
        }
        own[name] = replace_values(getattr(settings, name), values=inner)
    return dataclasses.replace(settings, **own)


def _item_type(hint: object) -> tuple[Any, tuple[str, ...]]:
    """Return the type of one value of a flag, without None, and its choices."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint, typing.get_args(hint)


def _metavar(flag: Flag) -> str:
    kind, choices = _item_type(flag.hint)
    given = flag.metadata.get("metavar") or {
        int: "N",
        float: "X",
        bool: "true|false",
        str: "TEXT",
    }.get(kind)
    return given or "{" + ",".join(choices) + "}"


def _help_text(flag: Flag) -> str:
    text = flag.metadata.get("description", "")
    # too long for the flag's line
    if "metavar" in flag.metadata and (choices := _item_type(flag.hint)[1]):
        text += f": {', '.join(choices)}"
    if flag.default not in (None, "", dataclasses.MISSING):
        shown = " ".join(flag.default) if isinstance(flag.default, tuple) else str(flag.default)
        text += f" (default {shown.lower() if isinstance(flag.default, bool) else shown})"
    return text.replace("%", "%%")
