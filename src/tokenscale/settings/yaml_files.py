"""YAML files as plain values. Host only.

What PyYAML raises for a file of other hands is more than its own errors: its constructors let through whatever Python
says of a date that no calendar has, or of a number of too many digits.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from tokenscale.base.errors import UserError, nearest

#: values of one file, those that anchors repeat counted each time: a hundred times the largest file here
MOST_VALUES = 100_000


def read_yaml(path: Path | str) -> dict[str, Any]:
    """A YAML mapping. Raises UserError for a missing file, broken YAML, repeated keys, text that is not Unicode, values
    that hold themselves or unfold without end, or another kind of document."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=_UniqueKeys)
        size = _size(values, {})
    except FileNotFoundError:
        near = nearest(Path(path).name, (file.name for file in Path(path).parent.glob("*.yaml")))
        hint = f"did you mean {Path(path).with_name(near)}?" if near else "name a file that is there"
        raise UserError("the configuration file is missing.", file=path, next=hint) from None
    except OSError as error:
        raise UserError("the file cannot be read.", file=path, reason=error.strerror, next="name a file") from None
    except RecursionError:
        raise UserError("the file is nested too deeply.", file=path, next="write it flatter") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError("the file is not readable YAML.", file=path, reason=error, next="mend it") from None
    if size > MOST_VALUES:
        raise UserError(
            "the file unfolds to too many values.",
            file=path,
            found=f"{size:,}",
            expected=f"at most {MOST_VALUES:,}",
            next="use fewer anchors (&name, *name)",
        )
    if not isinstance(values, dict):
        raise UserError(
            "the file is not a YAML mapping.",
            file=path,
            found=type(values).__name__,
            expected="key: value lines",
            next="write key: value lines",
        )
    return values


def _size(value: Any, known: dict[int, int | None]) -> int:
    """How many values there are, all told. ValueError for one that holds itself and for text that no file can hold."""
    if isinstance(value, str):
        value.encode("utf-8")  # a lone surrogate, "\ud800", is no character
        return 1
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = None
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in inner)
    if known[id(value)] is None:
        raise ValueError("a value holds itself")
    return known[id(value)]


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; YAML would keep the last one silently."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key) if isinstance(key, str) else None
        return super().construct_mapping(node, deep)


def main(files: list[str]) -> int:
    """Check that configuration files can be read, before Snakemake reads them: its messages do not name the file."""
    try:
        for file in files:
            read_yaml(file)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
