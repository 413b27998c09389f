"""Compare two reports' folders cell by cell: measures, claims, and facts that may explain a
difference.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_a = "the report to compare with, such as an older copy of results/report"
    parser.add_argument("a", type=Path, metavar="A", help=of_a)
    parser.add_argument("b", type=Path, metavar="B", help="the report that is compared")
    parser.add_argument("--output", type=Path, help="also write the result as Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences, and write them as Markdown."""
    from tokenscale.base.files import write_text
    from tokenscale.report import difference, table

    a = difference.read(arguments.a)
    b = difference.read(arguments.b)
    found = difference.difference(a, b).items()
    head = f"A is {a.name}, B is {b.name}."
    print(
        "\n".join([head, *(f"\n{title}\n\n{table.plain(rows)}" for title, rows in found)]), end=""
    )
    if arguments.output:
        parts = [
            f"# Two reports\n\n{head}\n",
            *(f"## {title}\n\n{table.markdown(rows)}" for title, rows in found),
        ]
        write_text(arguments.output, text="\n".join(parts))
    return 0
