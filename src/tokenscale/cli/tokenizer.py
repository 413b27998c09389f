"""Train or fetch a tokenizer, and write its manifest."""

import argparse
import time
from pathlib import Path

from tokenscale.base.wording import format_bytes
from tokenscale.data.tokenizers.load import build
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.options import from_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", required=True, metavar="JSON", help="the tokenizer settings")
    text = "kind bpe: results/corpus/NAME/manifest.json"
    parser.add_argument("--corpus", nargs="?", type=Path, metavar="FILE", help=text)
    text = "results/tokenizers/NAME/manifest.json"
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace, wait: bool = True) -> None:
    """Build the tokenizer and report its size."""
    settings = from_json(TokenizerSettings, text=arguments.settings)
    start = time.monotonic()
    directory = arguments.output.parent
    with hold_run_folder(directory, what=f"the tokenizer {settings.name}", wait=wait):
        manifest = build(
            settings,
            directory,
            corpus_directory=arguments.corpus.parent if arguments.corpus else None,
        )
    size = f"{manifest['vocabulary_size']:,} ids, file {format_bytes(manifest['file']['bytes'])}"
    print(
        f"tokenizer {manifest['name']} ({manifest['kind']}): {size}, "
        f"{time.monotonic() - start:.1f} s"
    )
