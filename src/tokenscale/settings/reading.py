"""YAML files as plain values. Host only."""

from pathlib import Path
from typing import Any

import yaml

from tokenscale.errors import UserError


def read_yaml(path: Path | str) -> dict[str, Any]:
    """A YAML mapping. Raises UserError for a missing file, broken YAML, repeated keys, or another kind of document."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=_UniqueKeys)
    except FileNotFoundError:
        raise UserError("the configuration file is missing.", file=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("the file is not readable YAML.", file=path, reason=error) from None
    if not isinstance(values, dict):
        raise UserError(
            "the file is not a YAML mapping.", file=path, found=type(values).__name__, expected="key: value lines"
        )
    return values


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
