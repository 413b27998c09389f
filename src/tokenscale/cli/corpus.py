"""Build raw Parquet with train and validation splits from raw text, or write the records files of a built corpus."""

import argparse
from pathlib import Path

from tokenscale.base.progress import Progress
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.raw_text import write_text_records
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import from_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `corpus`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--settings", metavar="JSON", help="build the corpus of these settings")
    what.add_argument(
        "--records",
        action="store_true",
        help="write the training documents again, so that one is read at the same cost in a corpus of any size",
    )
    parser.add_argument(
        "--downloads", nargs="?", type=Path, metavar="FILE", help="kinds url, hub: results/downloads/NAME/manifest.json"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/[records/]manifest.json"
    )


def run(arguments: argparse.Namespace) -> None:
    """Build the corpus, or write its records files, and report the size."""
    if arguments.records:
        directory = arguments.output.parent.parent
        with hold_run_folder(directory, "the corpus records", wait=True):
            files = write_text_records(directory)["files"]
        documents, size = sum(file["records"] for file in files), sum(file["bytes"] for file in files)
        print(f"records of {directory}: {documents:,} documents, {size / 2**20:,.1f} MiB")
        return
    settings = from_json(CorpusSettings, arguments.settings)
    progress = Progress(f"corpus {settings.name}")
    downloads = arguments.downloads.parent if arguments.downloads else None
    directory = arguments.output.parent
    with hold_run_folder(directory, f"the corpus {settings.name}", wait=True):
        splits = build(settings, directory, progress, downloads)["splits"]
    progress.close()
    rows = ", ".join(f"{name} {split['rows']:,}" for name, split in splits.items())
    print(f"{progress.line()}; {rows}")
