"""Configuration of a Snakemake call: the file that sets each value, and a record of the last call in this folder."""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json
from tokenscale.settings.profile import CONFIG_FILE, find_profile, load_profile, parse_config
from tokenscale.settings.yaml_files import read_yaml

#: stored next to Snakemake's own records; can be deleted
RECORD = Path(".snakemake/tokenscale-call.json")


@dataclass(frozen=True)
class Call:
    """Options of a Snakemake command line that change the configuration: `--configfile`, `--config`, `--profile`."""

    configfiles: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Options with which Snakemake, or a command of this project, reads the same configuration."""
        values = [f"{key}={json.dumps(value)}" for key, value in self.config.items()]
        files = ["--configfile", *self.configfiles] if self.configfiles else []
        # lists come first: an option behind them lets targets follow
        return [
            *files,
            *(["--config", *values] if values else []),
            *(["--profile", self.profile] if self.profile else []),
        ]

    @cached_property
    def from_profile(self) -> tuple[str, dict[str, Any]]:
        """(file of the profile, its `config:` values); empty without a profile and for a foreign one."""
        try:
            return _profile_config(*load_profile(self.profile)) if self.profile else ("", {})
        except UserError:
            return "", {}

    @property
    def layers(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(file, its values) in Snakemake's order of merging. Raises UserError for an unreadable file."""
        file, values = self.from_profile
        own = {key: value for key, value in self.config.items() if values.get(key) != value}
        read = [(name, read_yaml(name)) for name in (CONFIG_FILE, *self.configfiles) if Path(name).is_file()]
        return [*read, (file, values), ("--config", own)]

    def save(self, record: Path = RECORD) -> None:
        write_json(record, asdict(self) | {"config": dict(self.config)})


def _profile_config(file: Path, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(file), parse_config(file, values)


def parse_call(
    argv: Sequence[str], environment: MutableMapping[str, str], configfiles: Sequence[Path], config: Mapping[str, Any]
) -> Call:
    """Return the call of this process, from its command line and Snakemake's parsed options."""
    here = Path.cwd()
    # Snakemake appends the workflow's own file to what the command line names
    named = [path for path in map(Path, configfiles) if path.absolute() != here / CONFIG_FILE]
    files = tuple(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in named)
    return Call(files, dict(config), find_profile(argv, environment))


def load_last_call(record: Path = RECORD) -> Call | None:
    """Return the last Snakemake call in this folder that ran jobs; None before the first one."""
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return Call(tuple(values["configfiles"]), values["config"], values["profile"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


#: Snakemake call without options
NO_OPTIONS = Call()
