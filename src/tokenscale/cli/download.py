"""Download the files of a corpus of kind url or hub to results/downloads, and verify them by
hash.
"""

import argparse
from pathlib import Path

from tokenscale.base.wording import format_bytes
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.settings.data import FILE_LISTS, CorpusSettings
from tokenscale.settings.options import from_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", required=True, metavar="JSON", help="the corpus settings")
    text = "results/downloads/NAME/manifest.json"
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Download the files and report their number and size."""
    settings = from_json(CorpusSettings, text=arguments.settings)
    manifest = fetch_corpus(settings, directory=arguments.output.parent)
    files = [file for key in FILE_LISTS for file in manifest.get(key, ())]
    print(
        f"download {settings.name}: {len(files)} file(s), "
        f"{format_bytes(sum(f['bytes'] for f in files))}"
    )
