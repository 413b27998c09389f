"""Write the manifest of a mixture, which lists the corpora or the token stores that its runs read."""

import argparse
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.data.mixtures import write_mixture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for sources and output."""
    parser.add_argument("--names", nargs="+", required=True, metavar="CORPUS", help="names of the corpora")
    parser.add_argument(
        "--sources", nargs="+", required=True, type=Path, metavar="FILE", help="their manifests, or those of stores"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="results/mixtures/…/manifest.json")


def run(arguments: argparse.Namespace) -> None:
    """Write the manifest."""
    if len(arguments.names) != len(arguments.sources):
        found = f"{len(arguments.names)} names, {len(arguments.sources)} manifests"
        raise UserError("--names and --sources differ in number.", found=found, next="one manifest for each name")
    write_mixture(dict(zip(arguments.names, arguments.sources, strict=True)), arguments.output)
    print(f"{arguments.output}: {', '.join(arguments.names)}")
