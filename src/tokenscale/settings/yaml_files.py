"""Read YAML files as plain values: each error of a file is a user's error."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import read_file
from tokenscale.settings.options import join_key, raise_errors


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML mapping. Raises UserError for a missing file, another document, and what
    `parse_yaml` rejects.
    """
    try:
        text = read_file(path).decode("utf-8")
    except FileNotFoundError:
        near = find_nearest(
            Path(path).name, (file.name for file in Path(path).parent.glob("*.yaml"))
        )
        hint = f"did you mean {Path(path).with_name(near)}?" if near else "check the path"
        raise UserError("the configuration file is missing.", file=path, next=hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "the file cannot be read.", file=path, reason=reason, next="use a readable file"
        ) from None
    values = parse_yaml(text, file=str(path))
    if not isinstance(values, dict):
        kinds = {list: "a list", str: "a text", type(None): "nothing"}
        facts = {"found": kinds.get(type(values), "a value"), "expected": "key: value lines"}
        raise UserError(
            "the file is not a YAML mapping.", file=path, **facts, next="write key: value lines"
        )
    return values


def parse_yaml(text: str, *, file: str, key: str = "") -> Any:
    """Return the value of a YAML text, which `key` of `file` holds. Raises UserError for a text
    that is not YAML, duplicate keys, numbers that YAML 1.1 reads as other numbers, and values that
    JSON cannot hold.
    """
    where = {"file": file, "key": key or None}
    try:
        value = yaml.load(text, Loader=_Loader)
        problems = find_foreign_values(value, key)
    except RecursionError:
        raise UserError(
            "the file is nested too deeply.", **where, next="reduce the nesting"
        ) from None
    except yaml.MarkedYAMLError as error:
        # then the beginning helps
        ends = error.context_mark and "<stream end>" in (error.problem or "")
        mark = error.context_mark if ends else error.problem_mark or error.context_mark
        where["file"] = f"{file}, line {min(mark.line + 1, len(text.rstrip().splitlines()) or 1)}"
        facts = (error.context, error.problem, f"\n{mark.get_snippet(indent=0)}".rstrip(" ^\n"))
        reason = ", ".join(filter(None, facts[:2])) + facts[2]
        following = "correct this line"
        if error.problem == "mapping values are not allowed here":
            following = 'put a text with a colon in quotes: key: "text: more text"'
        raise UserError(
            "the file is not valid YAML.", **where, reason=reason, next=following
        ) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(
            "the file is not valid YAML.", **where, reason=error, next="correct it"
        ) from None
    raise_errors(problems, file=file)
    return value


def find_foreign_values(value: object, key: str = "") -> list[UserError]:
    """Return an error for each value that settings, which are JSON, cannot hold, from YAML, TOML or
    Snakemake.
    """
    found: list[UserError] = []
    complete: dict[int, bool] = {}

    def visit(value: object, key: str) -> None:
        def refuse(what: str, next: str) -> None:
            found.append(UserError(what, key=key or None, next=next))

        if isinstance(value, _Refused):
            refuse(value.what, value.next)
        elif isinstance(value, str):
            if re.search("[\ud800-\udfff]", value):
                refuse(
                    f"{value[:60]!r} has surrogates, which are not characters.", "correct the text"
                )
        elif isinstance(value, dict | list | tuple):
            if complete.get(id(value)) is False:
                refuse("a value contains itself.", "write the value out")
            elif id(value) not in complete:
                complete[id(value)] = False
                for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                    text = name.text if isinstance(name, _Refused) else name
                    if isinstance(value, dict) and not isinstance(name, str):
                        what = f"a key is not text: {text}."
                        found.append(
                            UserError(
                                what, key=join_key(key, text), next=f'put it in quotes: "{text}"'
                            )
                        )
                    visit(text, key)
                    visit(inner, join_key(key, text))
                complete[id(value)] = True
        elif isinstance(value, float):
            if not math.isfinite(value):
                refuse(f"{value} is not a finite number.", "write a number, or leave the key out")
        elif value is not None and not isinstance(value, int):
            what = (
                f"{str(value)[:60]!r} is a {type(value).__name__}, not text, a number, a list or "
                "a mapping."
            )
            refuse(what, "put it in quotes, if it is text")

    visit(value, key)
    return found


class _Refused(NamedTuple):
    """Value of a YAML file that no setting can have."""

    text: str
    what: str
    next: str


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, of which YAML would silently keep the last, and marks
    refused values.
    """

    def construct_object(self, node, deep=False):
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        shown = text if len(text) < 60 else f"{text[:60]}…"
        quoted = f'"{shown}" in quotes, if it is text'
        if tag == "timestamp":
            return _Refused(
                text=shown,
                what=f"{shown} is read as a date, which no setting is.",
                next=f"write {quoted}",
            )
        if tag not in ("str", "int", "float", "bool", "null", "map", "seq"):
            return _Refused(
                text=shown,
                what=f"values with the YAML tag {tag} are not read.",
                next="write them without the tag",
            )
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            if not text:
                raise
            return _Refused(
                text=shown,
                what=f"{shown} cannot be of the YAML type {tag}: {error}.",
                next=f"write {quoted}",
            )
        octal = re.fullmatch("[-+]?0[0-9_]+", text)
        if tag in ("int", "float") and (octal or ":" in text):
            meant = int(text.replace("_", "")) if octal else "one number"
            what = f"{shown} cannot be read as it is written: in YAML 1.1 it is {value}."
            return _Refused(text=shown, what=what, next=f"write {meant}; or {quoted}")
        return value

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = (
                self.construct_object(key_node, deep=True)
                if key_node.tag != "tag:yaml.org,2002:merge"
                else None
            )
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark
                )
            seen.add(key) if isinstance(key, str) else None
        return super().construct_mapping(node, deep)
