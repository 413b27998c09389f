"""Is a figure, a page or a report what its data and code draw? Says identical, data changed, code changed, not ours."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and where the tables are."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a figure (SVG, PDF, PNG), report.pdf or pages cut out of it, a report's folder or its SHA256SUMS",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with the tables to draw from")


def run(arguments: argparse.Namespace) -> int:
    """Print what is found; 0 where everything is identical, else 1."""
    from tokenscale.report.verification import IDENTICAL, text, verify

    found = [finding for path in arguments.files for finding in verify(path, arguments.results)]
    print(text(found))
    return int(any(finding.verdict != IDENTICAL for finding in found))
