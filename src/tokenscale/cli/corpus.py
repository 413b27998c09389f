"""Build raw Parquet with train and validation splits from raw text, and write the manifest."""

import argparse
from pathlib import Path

from tokenscale.base.progress import Progress
from tokenscale.data.corpus.build import build
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import from_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `corpus`."""
    parser.add_argument("--settings", required=True, metavar="JSON", help="the corpus settings")
    parser.add_argument(
        "--downloads", nargs="?", type=Path, metavar="FILE", help="kinds url, hub: results/downloads/NAME/manifest.json"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json")


def run(arguments: argparse.Namespace) -> None:
    """Build the corpus and report its size."""
    settings = from_json(CorpusSettings, arguments.settings)
    progress = Progress(f"corpus {settings.name}")
    downloads = arguments.downloads.parent if arguments.downloads else None
    directory = arguments.output.parent
    with hold_run_folder(directory, f"the corpus {settings.name}", wait=True):
        splits = build(settings, directory, progress, downloads)["splits"]
    progress.close()
    rows = ", ".join(f"{name} {split['rows']:,}" for name, split in splits.items())
    print(f"{progress.line()}; {rows}")
