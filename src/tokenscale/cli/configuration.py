"""Options of commands that read the configuration, with Snakemake's names and merge rules."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.errors import UserError

if TYPE_CHECKING:
    from tokenscale.settings.calls import Call
    from tokenscale.settings.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--configfile`, `--config` and `--profile`, as Snakemake has them."""
    parser.add_argument(
        "--configfile",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML merged over config/config.yaml; later files win",
    )
    parser.add_argument(
        "--config", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="values merged over all files"
    )
    parser.add_argument("--profile", help="Snakemake's profile, such as alps: its scale and its machine")


def read_call(arguments: argparse.Namespace) -> "Call":
    """Return what these options add to config/config.yaml. Raise UserError for a missing file or invalid value."""
    from tokenscale.settings.calls import Call

    for file in arguments.configfile:
        if not Path(file).is_file():
            raise UserError(
                "the configuration file is missing.",
                file=file,
                next="name an existing file; put names of experiments before --configfile",
            )
    return Call(tuple(arguments.configfile), dict(map(_parse_pair, arguments.config)), arguments.profile)


def load_configuration(arguments: argparse.Namespace, overrides: Mapping[str, Any] | None = None) -> "Config":
    """Load the configuration that these options name; `overrides` take precedence."""
    from tokenscale.settings.config import load_config

    call = read_call(arguments)
    return load_config(
        configfiles=call.configfiles, profile=call.profile, overrides={**call.config, **(overrides or {})}
    )


def _parse_pair(text: str) -> tuple[str, Any]:
    import yaml

    key, sign, value = text.partition("=")
    try:
        if sign:
            return key, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise UserError(
        "--config needs KEY=VALUE with a YAML value.",
        found=text,
        next=f"--configfile {text}" if Path(text).is_file() else "--config scale=workstation",
    )
