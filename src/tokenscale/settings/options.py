"""Settings classes: frozen stdlib dataclasses that pydantic decodes, with one set of rules for
every input.

Files, `--config`, flags, names of stores and the JSON of ranks and records are decoded here, with
the types, bounds, patterns and choices of the fields. pydantic is imported when a value is decoded.
"""

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import expand_path

if TYPE_CHECKING:
    import pydantic

T = TypeVar("T")

#: names of folders, workflow targets and jobs: no character is special to a file system or a shell
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAME_RULE = (
    "letters, digits, dot, dash and underscore, the first a letter or a digit, at most 100 (no "
    "accents)"
)
#: name of an extension in a run's settings: module, name and the digest of its code
EXTENSION_NAME = re.compile(r"[A-Za-z]\w*\.[A-Za-z]\w*\.[0-9a-f]{10}")
#: largest integer of settings, tables and NumPy; the bound of a field without a smaller one
LARGEST = (1 << 63) - 1
#: largest number of sequences, positions, ranks or units of one dimension: arrays and lists of it
#: fit into memory
MOST = 1 << 24
#: largest size of a vocabulary: ids are int32
LARGEST_VOCABULARY = (1 << 31) - 1
#: pydantic's configuration of a settings class
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": False}
#: value that no longer exists → what replaces it
REMOVED = {
    "archive": "use the format token-list or padded with `codec: zstd`, which is their default"
}
#: pydantic's error types for an unknown key
UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
#: pydantic's name of a bound → its sign
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
#: pydantic's error types for a value that is no mapping
NO_MAPPING = ("arguments_type", "dataclass_type", "dict_type", "model_type")
#: its error types for a value that is no list
NO_LIST = ("list_type", "tuple_type")
#: its other error types without facts of their own → what the value should be
EXPECTED = {
    **dict.fromkeys(NO_MAPPING, "keys and values"),
    **dict.fromkeys(NO_LIST, "a list"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "an integer"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    "string_type": "a text",
}
#: number of further errors that a message lists
MAX_LISTED = 20
#: functions that return where a key belongs that is unknown where it stands (see
#: settings/config.py)
HOMES: list[Callable[[str], list[str]]] = []


def option(
    default: object = dataclasses.MISSING,
    description: str = "",
    *,
    science: bool = True,
    **bounds: Any,
) -> Any:
    """Return a dataclass field with default, description and bounds. `science=False`: it never
    affects a run's id.
    """
    metadata = {"description": description, "science": science, **bounds}
    if isinstance(default, type):  # a class is used as default factory
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class _Size:
    """Rule for the integers of a list, which bounds of its field do not reach: 0 to `MOST`."""

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "strict": True, "ge": 0, "le": MOST}


class Validator:
    """An annotation of pydantic that takes a function of the value, such as `BeforeValidator`. It is
    made when a value is decoded.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name = name
        self._function = function

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[Any], Any]) -> Any:
        import pydantic

        annotation = getattr(pydantic, self._name)(self._function)
        return annotation.__get_pydantic_core_schema__(source, handler)


class _OrExtension(Validator):
    """Annotation of a field with choices that also takes the name of an extension, which users write
    as `module:Name` (settings/extensions.py).
    """

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": r"^\w+:\w+$"}]}


def _pass_extension(value: Any, decode_choice: Callable[[Any], Any]) -> Any:
    named = isinstance(value, str) and EXTENSION_NAME.fullmatch(value)
    return value if named else decode_choice(value)


OR_EXTENSION = _OrExtension("WrapValidator", _pass_extension)


def replace_synonyms(synonyms: Mapping[str, str]) -> Validator:
    """Return the annotation of a field with `synonyms`, other words for its values: they are
    replaced, also in flags.
    """
    return Validator(
        "BeforeValidator",
        lambda value: synonyms.get(value, value) if isinstance(value, str) else value,
    )


def _read_boolean(value: object) -> Any:
    """Return the boolean that a text names: Snakemake passes `--config key=true` as text."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _refuse_boolean(value: object) -> Any:
    """Return the value unless it is a boolean, which Python reads as the number 1 or 0."""
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _expand(value: Any) -> Any:
    """Replace `~` and `$VARIABLES` in a path, and in each path of a list."""
    if isinstance(value, tuple):
        return tuple(map(_expand, value))
    if value == "":
        raise ValueError("a path, not the empty text that a variable without a value leaves")
    try:
        return value and expand_path(value)
    except UserError as error:
        raise ValueError(f"a path whose variables are set ({error.facts['next']})") from None


#: annotation of a field with `path=True`
EXPANDED_PATH = Validator("AfterValidator", _expand)
_BOOLEAN = Validator("BeforeValidator", _read_boolean)
_NUMBER = Validator("BeforeValidator", _refuse_boolean)


@typing.dataclass_transform(frozen_default=True)
def settings_class(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are settings.

    Unknown keys, infinity and NaN are refused. Integers and booleans are never converted from other
    types, but for the text of a flag, `true` and `false`; an integer is not negative and has at
    most 63 bits; those of a list are at most `MOST`.
    """
    for name, hint in cls.__annotations__.items():
        metadata = getattr(cls.__dict__.get(name), "metadata", {})
        kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        if kinds & {int, bool}:
            field = cls.__dict__.get(name, dataclasses.MISSING)
            field = field if isinstance(field, dataclasses.Field) else option(field)
            bounds = {"strict": True} | ({"ge": 0, "le": LARGEST} if int in kinds else {})
            field.metadata = types.MappingProxyType({**bounds, **field.metadata})
            setattr(cls, name, field)
            if bool in kinds:
                cls.__annotations__[name] = Annotated[hint, _BOOLEAN]
        elif float in kinds:
            cls.__annotations__[name] = Annotated[hint, _NUMBER]
        elif metadata.get("extensions"):
            cls.__annotations__[name] = Annotated[hint, OR_EXTENSION]
        elif metadata.get("path"):
            cls.__annotations__[name] = Annotated[hint, EXPANDED_PATH]
        elif synonyms := metadata.get("synonyms"):
            cls.__annotations__[name] = Annotated[hint, replace_synonyms(synonyms)]
        elif hint in (tuple[int, ...], tuple[float, ...]):
            item = Annotated[int, _Size()] if hint == tuple[int, ...] else Annotated[float, _NUMBER]
            cls.__annotations__[name] = tuple[item, ...]  # type: ignore[valid-type]
    cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


def get_default(field: dataclasses.Field) -> Any:
    """Return a field's default; dataclasses.MISSING for a required field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_dict(settings: Any, *, science_only: bool = False) -> dict[str, Any]:
    """Return a settings object as nested plain values, without fields that equal their default.

    Leaving out defaults keeps the ids of old runs when an option is added. `science_only` also
    leaves out names and labels.
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


def _to_plain(value: object, science_only: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_plain(v, science_only) for v in value]
    return to_dict(value, science_only=science_only) if dataclasses.is_dataclass(value) else value


@functools.cache
def type_adapter(hint: Any) -> "pydantic.TypeAdapter":
    """Return pydantic's decoder of a settings class or of the type of a flag. Building one takes up
    to 50 ms.
    """
    import pydantic

    config = None if dataclasses.is_dataclass(hint) else pydantic.ConfigDict(allow_inf_nan=False)
    return pydantic.TypeAdapter(hint, config=config)


def decode(
    hint: object,
    values: object,
    form: str = "python",
    *,
    key: str = "",
    label: str = "key",
    **where: Any,
) -> Any:
    """Return values of a form (`python`, `json`: text, `strings`: each value as text) as settings.

    Raises one UserError for all invalid values. `label` names the fact with the key, `where` are
    facts for `combine`.
    """
    import pydantic

    try:
        return getattr(type_adapter(hint), f"validate_{form}")(values)
    except pydantic.ValidationError as error:
        found = [_describe(hint, entry, key=key) for entry in error.errors(include_url=False)]
    # a misspelt key may also be reported as missing
    found.sort(key=lambda problem: "allowed" not in problem[2])
    raise combine(found, label, **where)


def from_json(cls: type[T], text: str) -> T:
    """Return a settings object from JSON. Raises UserError for other text and invalid values."""
    return decode(cls, values=text, form="json")


def as_list(function: Callable[..., Iterator[T]]) -> Callable[..., list[T]]:
    return functools.wraps(function)(lambda *values, **named: list(function(*values, **named)))


def raise_errors(
    errors: Iterable[UserError | tuple[str, str]], *, key: str = "", **where: Any
) -> None:
    """Raise one UserError for all errors, if there are any: UserErrors, and (field, what is wrong)
    of `problems()`.

    `key` is the parent of their keys. `where` are facts for `combine`.
    """
    found = []
    for error in errors:
        if isinstance(error, tuple):
            facts = {
                "key": error[0],
                "reason": error[1],
                "next": "change this key, or the one that it conflicts with",
            }
            error = UserError("the settings do not fit together.", **facts)
        facts = {**error.facts}
        found.append((join_key(key, facts.pop("key", "")), error.what, facts))
    if found:
        raise combine(found, **where) from None


@contextmanager
def collect(errors: list[UserError], **where: str) -> Iterator[None]:
    """Add the UserError of a `with` block to a list, to report it together with others by
    `raise_errors`. `where` are facts for it.
    """
    try:
        yield
    except UserError as error:
        error.facts = where | error.facts
        errors.append(error)


def combine(
    found: list[tuple[str, str, dict[str, Any]]], label: str = "key", **where: Any
) -> UserError:
    """Return the error for the first problem (key, what, facts), with a line for each of the
    others.

    `where` are facts of all of them, such as `file`: a name, or a function from a key to the file
    that sets it.
    """
    lines: list[str] = []
    source = where.pop("file", None)
    first = found[0][2]
    for key, what, facts in found:
        file = facts.setdefault("file", source(key) if callable(source) else source)
        line = facts.get("reason") or what.removeprefix(f"{key} ").rstrip(".")
        line += f", expected {facts['expected']}" if "expected" in facts else ""
        line += (
            f", {facts['next']}"
            if facts.get("next", "").startswith(("did you", "write it as"))
            else ""
        )
        lines.append(": ".join(filter(None, [file if file != first["file"] else "", key, line])))
        lines += facts.get("also", "").splitlines()
    own, *lines = dict.fromkeys(lines)
    lines[MAX_LISTED:] = (
        [f"{len(lines) - MAX_LISTED} more errors"] if len(lines) > MAX_LISTED else []
    )
    key, what, facts = found[0]
    shown = {
        "file": facts.pop("file"),
        label: key or None,
        **where,
        **facts,
        "also": "\n".join(lines) or None,
    }
    return UserError(what, **(shown | {"next": shown.pop("next", None)}))


def _describe(cls: Any, entry: Any, key: str) -> tuple[str, str, dict[str, Any]]:
    """Return (key, what is wrong, facts) of one of pydantic's errors."""
    where = join_key(key, *entry["loc"])
    value = entry["input"]
    context = entry.get("ctx", {})
    if entry["type"] == "json_invalid":
        facts = {"found": str(value)[:200], "reason": context["error"]}
        return (
            where,
            "the settings are not readable JSON.",
            facts | {"next": "use text that this project has written"},
        )
    if entry["type"] in UNKNOWN_KEY:
        return where, *_describe_unknown_key(cls, location=entry["loc"])
    if entry["type"] in ("missing", "missing_argument"):
        return where, "a key is missing.", {"next": "add it"}
    expected = _describe_expected(entry["type"], context) or entry["msg"]
    near = None
    if isinstance(value, str) and entry["type"] == "literal_error":
        if value in REMOVED:
            return where, f"the format {value} no longer exists.", {"next": REMOVED[value]}
        near = find_nearest(value, words=expected.replace(" or ", ", ").split(", "))
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}…"
    following = f"write {'a number ' if expected[0] in '≥>≤<' else ''}{expected}"
    if entry["type"] in NO_MAPPING:
        following = f"write {_show_keys(cls, location=entry['loc'])}"
        if isinstance(value, list) and not _list_fields(cls, location=entry["loc"]):
            following = f"write {{{', '.join(f'{name}: {{…}}' for name in value)}}}"
    if entry["type"] in NO_LIST:
        following = f"write [{value if isinstance(value, str) else json.dumps(value, default=str)}]"
    if near:
        following = f"did you mean {near!r}?"
    facts = {"expected": expected, "next": following}
    return where, f"{where or 'the settings'} cannot be {shown}.", facts


def _show_keys(cls: object, location: tuple) -> str:
    """Return a mapping with one of the keys that a class has at a place, such as `{steps: …}`."""
    fields = _list_fields(cls, location=location)
    return f"{{{fields[0]}: …}}" if fields else "{key: value}"


def _describe_unknown_key(cls: object, location: tuple) -> tuple[str, dict[str, Any]]:
    """Return (what is wrong, facts) of a key that a class lacks."""
    word = str(location[-1])
    fields = _list_fields(cls, location=location[:-1])
    homes = [home for find in HOMES for home in find(word)]
    # a key that belongs elsewhere is not taken for one that is only similar
    near = find_nearest(word, words=fields, cutoff=0.8 if homes else 0.6)
    hints = []
    if near:
        hints.append(f"did you mean {near!r}?")
    if homes:
        hints.append(f"write it as {' or '.join(homes)}")
    next_step = " Or ".join(hints) or "remove it, or use one of the allowed keys"
    return f"unknown key {word!r}.", {"allowed": ", ".join(fields), "next": next_step}


def _describe_expected(kind: str, context: dict[str, Any]) -> str | None:
    """Return what a value must be, from pydantic's type of error and its facts; None for a type
    that no settings class gives.
    """
    if kind in EXPECTED:
        return EXPECTED[kind]
    if kind == "literal_error":
        return context["expected"].replace("'", "")
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return (
            NAME_RULE
            if context["pattern"] == NAME_PATTERN
            else f"a text that matches {context['pattern']}"
        )
    if kind in ("string_too_short", "too_short"):
        return "not empty"
    bounds = [f"{sign} {context[name]}" for name, sign in SIGNS.items() if name in context]
    return bounds[0] if bounds else None


def join_key(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if str(part))


def _list_fields(cls: object, location: tuple) -> list[str]:
    """Return the names of the fields of the class at a location below `cls`."""
    for part in location:
        if (origin := typing.get_origin(cls)) in (dict, tuple):
            cls = typing.get_args(cls)[origin is dict]
            continue
        hint = typing.get_type_hints(cls).get(part) if dataclasses.is_dataclass(cls) else None
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(h for h in typing.get_args(hint) if h is not type(None))
        cls = hint
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
