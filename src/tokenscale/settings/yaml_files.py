"""Read YAML files as plain values, and validate values as settings with pydantic: each problem is a user's error.

PyYAML's constructors raise more than its own errors, for example for impossible dates.
"""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pydantic
import yaml

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.settings.data import unknown_format_error
from tokenscale.settings.options import NAME_PATTERN, NAME_RULE


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises UserError for a missing file, invalid YAML, duplicate keys, text that is not Unicode, a value that contains
    itself, and a document that is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=_UniqueKeys)
        _check_values(values, {})
    except FileNotFoundError:
        near = find_nearest(Path(path).name, (file.name for file in Path(path).parent.glob("*.yaml")))
        hint = f"did you mean {Path(path).with_name(near)}?" if near else "check the path"
        raise UserError("the configuration file is missing.", file=path, next=hint) from None
    except OSError as error:
        raise UserError(
            "the file cannot be read.", file=path, reason=error.strerror, next="use a readable file"
        ) from None
    except RecursionError:
        raise UserError("the file is nested too deeply.", file=path, next="reduce the nesting") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError("the file is not valid YAML.", file=path, reason=error, next="correct it") from None
    if not isinstance(values, dict):
        raise UserError(
            "the file is not a YAML mapping.",
            file=path,
            found=type(values).__name__,
            expected="key: value lines",
            next="use key: value lines",
        )
    return values


def _check_values(value: Any, complete: dict[int, bool]) -> None:
    """Raise ValueError for a value that contains itself, and for text that UTF-8 cannot encode."""
    if isinstance(value, str):
        value.encode("utf-8")  # raises for a lone surrogate, "\ud800"
    if not isinstance(value, (dict, list)) or complete.get(id(value)):
        return
    if id(value) in complete:
        raise ValueError("a value contains itself")
    complete[id(value)] = False
    for one in [*value, *value.values()] if isinstance(value, dict) else value:
        _check_values(one, complete)
    complete[id(value)] = True


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key) if isinstance(key, str) else None
        return super().construct_mapping(node, deep)


def main(files: list[str]) -> int:
    """Check configuration files before Snakemake reads them, whose messages do not name the file."""
    try:
        for file in files:
            read_yaml(file)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


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
