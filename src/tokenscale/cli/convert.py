"""Token stores from and to the formats of others: Megatron-LM's pair, nanoGPT's .bin, Hugging Face data on disk."""

import argparse
import shlex
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to convert, into what, and what a file cannot say."""
    from tokenscale.cli.convert_settings import FLAGS
    from tokenscale.settings import flags

    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT [--tokenizer FOLDER] [options]"
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a store, a pair's prefix, a .bin, a folder")
    parser.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help="the same, to write; padded, token-list: also FILE.parquet",
    )
    flags.add(parser, FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Convert, and say what came of it."""
    from tokenscale.cli import convert_command as command
    from tokenscale.settings import flags

    settings = command.ConvertSettings(**flags.stated(arguments, command.FLAGS))
    words = shlex.join(["python", "-m", "tokenscale", *sys.argv[1:]])
    command.convert(settings, arguments.source, arguments.target, print, words)
