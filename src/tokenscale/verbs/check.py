"""Check the configuration and every experiment at every scale; with --write, renew schemas and key tables."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check."""
    parser.add_argument("--config", default="config/config.yaml", help="configuration file")
    parser.add_argument(
        "--write", action="store_true", help="write workflow/schemas/*.json and the tables of config/README.md"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raise UserError at the first thing that is wrong."""
    from tokenscale.files import write_json
    from tokenscale.settings import config as configuration
    from tokenscale.settings import reference

    if arguments.write:
        for name, schema in configuration.schemas().items():
            write_json(Path("workflow/schemas") / name, schema)
        reference.update(Path("config/README.md"))
        return 0
    for scale in configuration.SCALES:
        config = configuration.load(arguments.config, overrides={"scale": scale})
        for name in config.available:
            print(f"{scale:<12} {name}: {len(config.runs(name))} runs")
    return 0
