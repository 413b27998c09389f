"""Raw Parquet → one token store, with its manifest."""

import argparse
import importlib
from pathlib import Path

from tokenscale.corpus.progress import Progress
from tokenscale.corpus.reader import read_manifest
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--store", required=True, metavar="NAME", help="for example padded-sequence_length=2048")
    parser.add_argument("--corpus", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=Path("results/tokenizers/tekken/manifest.json"),
        metavar="FILE",
        help="results/tokenizers/NAME/manifest.json; Tekken by default",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="results/tokens/…/manifest.json")


def run(arguments: argparse.Namespace) -> None:
    """Write the store and say what it holds."""
    store = StoreSettings.parse(arguments.store)
    documents = read_manifest(arguments.corpus.parent)["splits"][store.split]["rows"]
    progress = Progress(f"store {store.directory}", total=documents)
    write = importlib.import_module(FORMATS[store.format]).write
    manifest = write(store, arguments.corpus.parent, arguments.tokenizer.parent, arguments.output.parent, progress)
    progress.close()
    print(
        f"{progress.line()}; {manifest['rows']:,} rows, {manifest['tokens_useful']:,} useful of "
        f"{manifest['tokens_total']:,} tokens (fill {manifest['fill']:.2%}), {manifest['tokens_cut']:,} cut"
    )
