"""Configuration layers of a call: a Snakemake profile, configuration files, and values of the
command line.
"""

import functools
import json
from collections.abc import Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.settings.experiments import merge_settings
from tokenscale.settings.yaml_files import parse_yaml, read_yaml

#: base configuration, read by Snakemake and every command; `--configfile` files are merged over it
CONFIG_FILE = "config/config.yaml"

#: names of a profile's file, without the optional version (`config.v9+.yaml`)
BASENAMES = ("profile", "config")
#: command-line options that select a profile
OPTIONS = ("--profile", "--workflow-profile")
#: environment variable that passes the profile on to the jobs of a Snakemake process
PROFILE_VARIABLE = "TOKENSCALE_PROFILE"
#: mappings of a profile that Snakemake replaces as a whole by the command-line option of the same
#: name
MAPS = ("default-resources", "set-resources", "set-threads")


def load_profile_config(profile: str, root: Path | str = ".") -> dict[str, Any]:
    """Load a profile's `configfile:`, overridden by its `config:`. Raises UserError if there is no
    such profile.
    """
    file, values = load_profile(profile, root)
    read = [read_yaml(Path(root) / name) for name in list_texts(values.get("configfile"))]
    return functools.reduce(merge_settings, [*read, parse_config(file, values)])


def list_texts(value: object) -> list[str]:
    """Return the texts of an option of a profile, which may be one value or a list."""
    if not value:
        return []
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def parse_config(file: Path | str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a profile's `config:`, a mapping or `key=value` texts. Raises UserError for a text
    without `=`.
    """
    config = values.get("config")
    return (
        dict(config)
        if isinstance(config, Mapping)
        else dict(parse_pair(t, file=str(file)) for t in list_texts(config))
    )


def load_profile(profile: str, root: Path | str = ".") -> tuple[Path, dict[str, Any]]:
    """Return a profile's file and its values. `profile` is a folder, or a name here or in
    profiles/.
    """
    file, values = _load_known(profile, root)
    if isinstance(file, Path):
        return file, values
    available = sorted({path.parent.name for path in Path(root).glob("profiles/*/*.yaml")})
    expected = f"config.yaml in {Path(root) / profile} or {Path(root) / 'profiles' / profile}"
    facts = {"expected": expected, "found": ", ".join(available) or "no profile"}
    near = find_nearest(profile, words=available)
    following = f"did you mean {near}?" if near else "use a profile's name or folder"
    raise UserError("there is no such profile.", profile=profile, **facts, next=following)


def _load_known(profile: str | None, root: Path | str = ".") -> tuple[Path | str, dict[str, Any]]:
    """Return a profile's file and its values; empty without a profile, and for one that Snakemake
    finds elsewhere.
    """
    if not profile:
        return "", {}
    patterns = [pattern for name in BASENAMES for pattern in (f"{name}.v*+.yaml", f"{name}.yaml")]
    for folder in (Path(root) / profile, Path(root) / "profiles" / profile):
        for pattern in patterns:
            for file in sorted(folder.glob(pattern)):
                return file, read_yaml(file)
    return "", {}


def parse_pair(text: str, file: str = "--config") -> tuple[str, Any]:
    """Return key and YAML value of `key=value`. Raises UserError for another text, and what
    `parse_yaml` rejects.
    """
    key, sign, value = text.partition("=")
    if not sign:
        next_step = (
            f"--configfile {text}"
            if Path(text).is_file()
            else "write key=value, such as scale=workstation"
        )
        raise UserError(
            "an item of --config is not KEY=VALUE with a YAML value.",
            file=file,
            found=text,
            next=next_step,
        )
    return key, parse_yaml(value, file=file, key=key)


def find_profile(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the profile selected by Snakemake's command line or by the environment."""
    named = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word in OPTIONS]
    named += [
        word.split("=", 1)[1]
        for word in argv
        if word.startswith(tuple(f"{option}=" for option in OPTIONS))
    ]
    return (
        next(iter(named), None)
        or environment.get("SNAKEMAKE_PROFILE")
        or environment.get(PROFILE_VARIABLE)
    )


def find_dropped_values(known: Container[str], profile: str | None) -> dict[str, Any]:
    """Return values of the profile in use that `known` lacks: `--config` makes Snakemake drop its
    whole `config:`.
    """
    values = load_profile_config(profile) if profile and _load_known(profile)[0] else {}
    return {key: value for key, value in values.items() if key not in known}


def find_replaced_entries(
    used: Mapping[str, Mapping[str, Any]], rules: Container[str], profile: str | None
) -> dict[str, list[str]]:
    """Return option → entries of the profile in use that the command line's mappings `used` lack.
    Entries of `set-resources` (as `rule:resource`) and `set-threads` count only for `rules`.
    """
    values = _load_known(profile)[1]
    lost = {
        name: [k for k in _list_entries(values.get(name)) if k not in _list_entries(used[name])]
        for name in MAPS
    }
    for name in MAPS[1:]:
        lost[name] = [key for key in lost[name] if key.partition(":")[0] in rules]
    return {name: keys for name, keys in lost.items() if keys}


def _list_entries(entries: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """List the names in a mapping or in a list of `key=value` texts.

    >>> _list_entries({"train": {"mem_mb": 1, "runtime": 2}}), _list_entries(["nodes=1"])
    (['train:mem_mb', 'train:runtime'], ['nodes'])
    """
    if not isinstance(entries, Mapping):
        return [str(entry).partition("=")[0] for entry in entries or []]
    nested = {
        name: [f"{name}:{inner}" for inner in v]
        for name, v in entries.items()
        if v and isinstance(v, Mapping)
    }
    return [key for name in entries for key in nested.get(name, [name])]


@dataclass(frozen=True)
class Call:
    """Options of a Snakemake command line that change the configuration: `--configfile`,
    `--config`, `--profile`.
    """

    configfiles: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Options with which Snakemake, or a command of this project, reads the same
        configuration.
        """
        values = [f"{key}={json.dumps(value)}" for key, value in self.config.items()]
        files = ["--configfile", *self.configfiles] if self.configfiles else []
        # lists come first: an option behind them lets targets follow
        return (
            files
            + (["--config", *values] if values else [])
            + (["--profile", self.profile] if self.profile else [])
        )

    def layers(
        self, root: Path | str = ".", file: Path | str = CONFIG_FILE
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Return (file, its values) in Snakemake's order of merging, without the file of a profile
        from elsewhere.

        Raises UserError for an unreadable file.
        """
        of_profile, values = _load_known(self.profile, root)
        config = parse_config(of_profile, values)
        own = {key: value for key, value in self.config.items() if config.get(key) != value}
        read = [(str(name), read_yaml(Path(root) / name)) for name in (file, *self.configfiles)]
        return [*read, (str(of_profile), config), ("--config", own)]


def parse_call(
    argv: Sequence[str],
    environment: MutableMapping[str, str],
    configfiles: Sequence[Path],
    config: Mapping[str, Any],
) -> Call:
    """Return the call of this process, from its command line and Snakemake's parsed options.

    The profile is stored in `environment` for the jobs, which are started without it.
    """
    here = Path.cwd()
    profile = find_profile(argv, environment)
    if profile:
        environment[PROFILE_VARIABLE] = profile
    # Snakemake appends the workflow's own file to what the command line names
    named = [path for path in map(Path, configfiles) if path.absolute() != here / CONFIG_FILE]
    files = tuple(
        str(path.relative_to(here) if path.is_relative_to(here) else path) for path in named
    )
    return Call(configfiles=files, config=dict(config), profile=profile)
