"""What a profile of Snakemake says of the configuration: its scale, its machine. Host only (YAML)."""

from collections.abc import Container, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tokenscale.base.errors import UserError
from tokenscale.settings.experiments import merge
from tokenscale.settings.yaml_files import read_yaml

#: how Snakemake calls a profile's file, without the version that some names carry (`config.v9+.yaml`)
BASENAMES = ("profile", "config")
#: how a command line names one
OPTIONS = ("--profile", "--workflow-profile")
#: the variable in which jobs find the profile of the Snakemake that started them
CARRIED = "TOKENSCALE_PROFILE"
#: maps of a profile in whose place Snakemake puts what the option of that name says on the command line
MAPS = ("default-resources", "set-resources", "set-threads")


def configuration(profile: str, root: Path | str = ".") -> dict[str, Any]:
    """The values of a profile's `configfile:` and, over them, of its `config:`, a list of `key=value` or a mapping.

    `profile` is a folder, or a name that a folder here or in profiles/ has. Raises UserError where there is none.
    """
    root = Path(root)
    file, values = read(profile, root)
    result: dict[str, Any] = {}
    for name in configfiles(values):
        result = merge(result, read_yaml(root / name))
    return merge(result, stated(file, values))


def configfiles(values: Mapping[str, Any]) -> list[str]:
    """The files that a profile's `configfile:` names."""
    files = values.get("configfile") or []
    return [files] if isinstance(files, str) else list(files)


def stated(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile's `config:` sets: a mapping, or `key=value` texts. UserError for a text without `=`."""
    config = values.get("config") or {}
    if isinstance(config, Mapping):
        return dict(config)
    return dict(_pair(item, file) for item in ([config] if isinstance(config, str) else config))


def read(profile: str, root: Path | str = ".") -> tuple[Path, dict[str, Any]]:
    """A profile's file and what it says."""
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
    return file, read_yaml(file)


def _files(folder: Path) -> list[Path]:
    patterns = [pattern for name in BASENAMES for pattern in (f"{name}.v*+.yaml", f"{name}.yaml")]
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _pair(item: str, file: Path) -> tuple[str, Any]:
    key, sign, value = item.partition("=")
    if not sign:
        raise UserError(
            "a profile's config is no key=value.",
            file=file,
            key="config",
            found=item,
            next="write key=value, such as scale=workstation",
        )
    return key, yaml.safe_load(value)


def in_use(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The profile that a command line of Snakemake names, or the environment."""
    named = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word in OPTIONS]
    named += [word.split("=", 1)[1] for word in argv if word.startswith(tuple(f"{option}=" for option in OPTIONS))]
    return next(iter(named), None) or environment.get("SNAKEMAKE_PROFILE") or environment.get(CARRIED)


def left_out(known: Container[str], argv: Sequence[str], environment: MutableMapping[str, str]) -> dict[str, Any]:
    """Values of the profile in use that `--config` on the command line has taken away: those of the keys not `known`.

    Snakemake replaces a profile's `config:` by the command line's as a whole, machine and scale included. The profile
    is noted in `environment` for jobs, which are started without it. A profile that is not this project's has none.
    """
    profile = in_use(argv, environment)
    if not profile:
        return {}
    environment[CARRIED] = profile
    try:
        values = configuration(profile)
    except UserError:
        return {}
    return {key: value for key, value in values.items() if key not in known}


def taken_away(
    used: Mapping[str, Mapping[str, Any]], rules: Container[str], argv: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str]]:
    """Names in the maps of the profile in use that are not in the maps `used`, by the option that replaced them.

    Of `set-resources` and `set-threads` only what is said of `rules` counts; the former's are named `rule:resource`.
    A profile that is not this project's has none.
    """
    profile = in_use(argv, environment)
    try:
        values = read(profile, Path("."))[1] if profile else {}
    except UserError:
        return {}
    lost = {name: [key for key in _names(values.get(name)) if key not in _names(used[name])] for name in MAPS}
    of_all, *of_rules = MAPS
    lost |= {name: [key for key in lost[name] if key.partition(":")[0] in rules] for name in of_rules}
    return {name: keys for name, keys in lost.items() if keys}


def _names(entries: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """What a map names, or a list of `key=value`.

    >>> _names({"train": {"mem_mb": 1, "runtime": 2}}), _names(["nodes=1"])
    (['train:mem_mb', 'train:runtime'], ['nodes'])
    """
    if not isinstance(entries, Mapping):
        return [str(entry).partition("=")[0] for entry in entries or []]
    inner = {name: list(value) if isinstance(value, Mapping) else [] for name, value in entries.items()}
    return [name for key, names in inner.items() for name in ([f"{key}:{n}" for n in names] or [key])]
