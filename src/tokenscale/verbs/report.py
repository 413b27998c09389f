"""Tables → figures, the HTML page and the PDF."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-verb a product."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="figure | page | pdf")
    figure = parts.add_parser("figure", help="one figure as SVG, PDF, PNG, CSV and JSON")
    figure.add_argument("name", help="name of the figure")
    figure.add_argument("--tables", required=True, type=Path, help="results/tables/<experiment>")
    figure.add_argument(
        "--output", required=True, type=Path, help="path without ending: results/figures/<experiment>/<name>"
    )
    for name, ending in (("page", "html"), ("pdf", "pdf")):
        part = parts.add_parser(name, help=f"the report as {ending.upper()}")
        part.add_argument("--experiments", nargs="+", required=True, help="names of experiments, in order")
        part.add_argument(
            "--tables", type=Path, default=Path("results/tables"), help="folder of the experiments' tables"
        )
        part.add_argument(
            "--figures", type=Path, default=Path("results/figures"), help="folder of the experiments' figures"
        )
        part.add_argument(
            "--output", type=Path, default=Path(f"results/report/{'index' if name == 'page' else 'report'}.{ending}")
        )


def run(arguments: argparse.Namespace) -> int:
    """Make the part that is asked for and name its file."""
    if arguments.part == "figure":
        from tokenscale.analysis.queries import connect
        from tokenscale.report import registry, save

        registry.module(arguments.name)  # a misspelt name is told before a missing table
        with connect(arguments.tables) as connection:
            paths = save.save(arguments.name, connection, arguments.output)
        print(f"{arguments.output}.{{{','.join(p.suffix[1:] for p in paths)}}}")
    elif arguments.part == "page":
        from tokenscale.report import page

        page.write(arguments.experiments, arguments.tables, arguments.figures, arguments.output)
        print(arguments.output)
    else:
        from tokenscale.report import pdf

        pdf.write(arguments.experiments, arguments.tables, arguments.output)
        print(arguments.output)
    return 0
