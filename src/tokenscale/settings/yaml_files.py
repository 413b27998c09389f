"""Read YAML files as plain values: each problem is a user's error.

PyYAML's constructors raise more than its own errors, for example for impossible dates.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.settings.options import build, check_problems  # noqa: F401


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
