"""Run side-by-side measurements, each in isolation."""

import argparse
import importlib
from typing import Any

#: benchmark → its purpose; the module `tokenscale.benchmark.NAME` has its options
BENCHMARKS = {
    "storage": "write and read the same token ids in every format",
    "inference": "generate text with and without a key-value cache",
    "collectives": "time collectives between ranks: latency and bandwidth of the link",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, help_text in BENCHMARKS.items():
        _add_options_when_parsed(kinds.add_parser(name, help=help_text), name)


def run(arguments: argparse.Namespace) -> int | None:
    """Run a benchmark and print its table. Return the exit code of a process that was started
    elsewhere, if any.
    """
    return _load(arguments.benchmark).run(arguments)


def _add_options_when_parsed(parser: Any, name: str) -> None:
    """Add a benchmark's options when its command line is parsed, so that only its own module is
    imported.
    """
    parse = parser.parse_known_args

    def parse_known_args(arguments: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse
        _load(name).add_arguments(parser)
        return parse(arguments, namespace)

    parser.parse_known_args = parse_known_args


def _load(name: str) -> Any:
    # imported by name: a rule lists the module of its own benchmark as its code
    return importlib.import_module(f"tokenscale.benchmark.{name}")
