"""A checkpoint → a folder that from_pretrained of the library transformers loads, its tokenizer included."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to export, and where to."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="…/checkpoints/final, say")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="that the model was trained with, such as results/tokenizers/NAME; for a checkpoint that holds none",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the folder."""
    from tokenscale.cli.export_command import export

    export(arguments.checkpoint, arguments.output, arguments.tokenizer)
