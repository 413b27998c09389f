"""What to do with one's own text: padding, bytes and speed in each format, from a sample; with their uncertainty."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and what is known of the training."""
    from tokenscale.cli.advise_settings import FLAGS
    from tokenscale.settings import flags

    parser.usage = "%(prog)s FILE … [--tokenizer NAME] [--sequence-length N] [--tokens-per-second X] [options]"
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="Parquet, JSON lines or text; also patterns ('*.jsonl')"
    )
    flags.add(parser, FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Look, print, and write the facts where asked to."""
    from tokenscale.base.files import write_json
    from tokenscale.cli import advise_command as command
    from tokenscale.cli.advise_settings import FLAGS, AdviceSettings
    from tokenscale.cli.advise_text import render
    from tokenscale.settings import flags

    settings = AdviceSettings(**flags.stated(arguments, FLAGS))
    facts = command.advise(settings, tuple(arguments.files), print)
    print(render(facts))
    if settings.json:
        write_json(Path(settings.json), command.to_json(facts))
