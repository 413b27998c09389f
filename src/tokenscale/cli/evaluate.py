"""A checkpoint's perplexity, bits per byte and next-token accuracy, over any text; or its BLEU, of pairs."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to evaluate, and on what: by default on the held-out documents of the corpus it was trained on."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="…/checkpoints/final, say")
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--corpus",
        metavar="NAME",
        help="a corpus by its name or folder, or a file (Parquet, JSON lines, text): each document for itself",
    )
    data.add_argument(
        "--store", type=Path, metavar="MANIFEST", help="a packed store: its rows, as a training validates on them"
    )
    parser.add_argument("--split", choices=("train", "validation"), default="validation", help="of a corpus")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of a file of Parquet or JSON lines")
    parser.add_argument("--rows", type=int, metavar="N", help="stop after so many rows; by default all are read")
    parser.add_argument("--bleu", type=int, metavar="N", help="translate so many held-out pairs instead: BLEU")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU where there is one")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="that of the training, for a checkpoint that holds none"
    )


def run(arguments: argparse.Namespace) -> None:
    """Score, and print."""
    from tokenscale.cli.evaluate_command import evaluate

    def report(rows: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{rows:,} rows", end="", file=sys.stderr, flush=True)

    text = evaluate(report=report, **vars(arguments))
    print(("\r\033[K" if sys.stderr.isatty() else "") + text)
