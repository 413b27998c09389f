"""What a profile of Snakemake says of the configuration: its scale, its machine. Host only (YAML)."""

from pathlib import Path
from typing import Any

import yaml

from tokenscale.errors import UserError
from tokenscale.settings.config import read_yaml
from tokenscale.settings.experiments import merge

#: how Snakemake calls a profile's file, without the version that some names carry (`config.v9+.yaml`)
FILES = ("profile", "config")


def configuration(profile: str, root: Path | str = ".") -> dict[str, Any]:
    """The values of a profile's `configfile:` and, over them, of its `config:`, a list of `key=value` or a mapping.

    `profile` is a folder, or a name that a folder here or in profiles/ has. Raises UserError where there is none.
    """
    root = Path(root)
    folders = [root / profile, root / "profiles" / profile]
    file = next((file for folder in folders for file in _files(folder)), None)
    if file is None:
        found = sorted({path.parent.name for path in root.glob("profiles/*/*.yaml")})
        raise UserError(
            "there is no such profile.",
            profile=profile,
            expected=f"config.yaml in {' or '.join(str(folder) for folder in folders)}",
            found=", ".join(found) or "no profile",
            next="name a profile, or the folder that holds its config.yaml",
        )
    values = read_yaml(file)
    files, stated = values.get("configfile") or [], values.get("config") or {}
    result: dict[str, Any] = {}
    for name in [files] if isinstance(files, str) else files:
        result = merge(result, read_yaml(root / name))
    if not isinstance(stated, dict):
        stated = dict(_pair(item, file) for item in ([stated] if isinstance(stated, str) else stated))
    return merge(result, stated)


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES for path in sorted([*folder.glob(f"{name}.v*+.yaml"), *folder.glob(f"{name}.yaml")])]


def _pair(item: str, file: Path) -> tuple[str, Any]:
    key, sign, value = item.partition("=")
    if not sign:
        raise UserError("a profile's config is no key=value.", file=file, key="config", found=item)
    return key, yaml.safe_load(value)
