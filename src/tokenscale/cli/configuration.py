"""The options of commands that read the configuration, with Snakemake's names and merge rules."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.errors import UserError

if TYPE_CHECKING:
    from tokenscale.settings.calls import Call
    from tokenscale.settings.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--configfile`, `--config` and `--profile`, as Snakemake has them."""
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


def call_of(arguments: argparse.Namespace) -> "Call":
    """What these options add to config/config.yaml. UserError for a file that is missing and a value without a key."""
    from tokenscale.settings.calls import Call

    for file in arguments.configfile:
        if not Path(file).is_file():
            raise UserError(
                "the configuration file is missing.",
                file=file,
                next="name a file that is there; names of experiments stand before --configfile",
            )
    return Call(tuple(arguments.configfile), dict(map(_pair, arguments.config)), arguments.profile)


def configuration(arguments: argparse.Namespace, overrides: Mapping[str, Any] | None = None) -> "Config":
    """The configuration that these options name; `overrides` win over it."""
    from tokenscale.settings.config import load_config

    call = call_of(arguments)
    return load_config(
        configfiles=call.configfiles, profile=call.profile, overrides={**call.config, **(overrides or {})}
    )


def _pair(text: str) -> tuple[str, Any]:
    import yaml

    key, sign, value = text.partition("=")
    try:
        if sign:
            return key, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise UserError(
        "--config takes KEY=VALUE, with a value that is YAML.",
        found=text,
        next=f"--configfile {text}" if Path(text).is_file() else "--config scale=workstation",
    )
