"""What experiments would run, the memory it needs and what it takes; or, with --output, a run table as a file."""

import argparse
import json
from pathlib import Path

from tokenscale.cli import configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment, and the configuration to read it from."""
    names = "names of experiments, or all_experiments; by default those of the report"
    parser.add_argument("experiment", nargs="*", help=names)
    parser.add_argument("--config-json", type=json.loads, help="configuration as JSON, instead of the file")
    configuration.add_arguments(parser)
    parser.add_argument("--scale", help="overlay to use instead of the configured one")
    parser.add_argument("--machine", help="file of the machine to count nodes of, such as profiles/alps/machine.toml")
    parser.add_argument("--output", type=Path, help="write the run table of one experiment as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print or write."""
    from tokenscale.base.errors import UserError
    from tokenscale.base.files import write_json
    from tokenscale.cli.plan_command import plan
    from tokenscale.settings.config import Config

    overrides = {key: value for key in ("scale", "machine") if (value := getattr(arguments, key)) is not None}
    if arguments.config_json is not None:
        config = Config({**arguments.config_json, **overrides})
    else:
        config = configuration.configuration(arguments, overrides)
    names = config.chosen(arguments.experiment)
    if arguments.output:
        if len(names) != 1:
            raise UserError("--output takes one experiment.", found=", ".join(names))
        write_json(arguments.output, config.table(names[0]))
        return 0
    for line in plan(config, names):
        print(line)
    return 0
