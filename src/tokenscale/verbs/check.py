"""Check the configuration and every experiment at every scale; with --schemas, write the JSON schemas for editors."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check."""
    parser.add_argument("--config", default="config/config.yaml", help="configuration file")
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="write the JSON schemas into this folder")


def run(arguments: argparse.Namespace) -> int:
    """Raise UserError at the first thing that is wrong."""
    from tokenscale.files import write_json
    from tokenscale.settings import config as configuration

    if arguments.schemas:
        for name, schema in configuration.schemas().items():
            write_json(arguments.schemas / name, schema)
            print(f"wrote {arguments.schemas / name}")
        return 0
    for scale in configuration.SCALES:
        config = configuration.load(arguments.config, overrides={"scale": scale})
        for name in config.available:
            print(f"{scale:<12} {name}: {len(config.runs(name))} runs")
    return 0
