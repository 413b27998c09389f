"""Build the report from tables: figures, descriptions, HTML pages, the PDF, and the folder that holds
them all.

The folder has the packed logs of its runs; `rebuild` makes tables and report again from them.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError

LEDGER = Path("config/claims.yaml")
#: cautions that `page` prints; the page has all
CAUTIONS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar=" | ".join(PARTS))
    added = {name: parts.add_parser(name, help=text) for name, (_, text) in PARTS.items()}
    figure, description, page, pdf, bundle, rebuild = added.values()
    figure.add_argument("name", help="name of the figure")
    of_figure = "results/figures/<experiment>/<name>, with any of the endings or none"
    of_description = "results/figures/<experiment>/description.json"
    for part, file in ((figure, of_figure), (description, of_description)):
        part.add_argument("--tables", required=True, type=Path, help="results/tables/<experiment>")
        part.add_argument("--output", required=True, type=Path, help=file)
    for part in (page, pdf, bundle):
        add = part.add_argument
        add("--experiments", nargs="+", required=True, help="names of experiments, in order")
        add(
            "--figures",
            type=Path,
            default=Path("results/figures"),
            help="folder of the experiments' figures and descriptions",
        )
        add("--output", type=Path, required=True, help="the file, or of the bundle the folder")
    of_several = "instead, the page of one of several experiments, without the claims"
    page.add_argument("--of-several", action="store_true", help=of_several)
    for part in (page, pdf):
        part.add_argument(
            "--claims",
            type=Path,
            metavar="FILE",
            help="claims.json, as the command claims writes it",
        )
    for part in (bundle, rebuild):
        for name, default in (("workflow", "workflow/Snakefile"), ("citation", "CITATION.cff")):
            what = f"{Path(default).name} to copy, where there is one"
            part.add_argument(f"--{name}", type=Path, default=Path(default), help=what)
        part.add_argument(
            "--ledger", type=Path, default=LEDGER, help=f"the claims; by default {LEDGER}"
        )
    bundle.add_argument(
        "--tables",
        type=Path,
        default=Path("results/tables"),
        help="folder of the experiments' tables",
    )
    bundle.add_argument(
        "--no-logs", action="store_true", help="leave the logs out, so that `verify` proves nothing"
    )
    bundle.add_argument(
        "--also", nargs="*", default=[], type=Path, help="further files of the folder, to be listed"
    )
    rebuild.add_argument("archive", type=Path, metavar="FILE")
    rebuild.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder laid out like results/"
    )


def run(arguments: argparse.Namespace) -> int:
    """Build the requested part and print its path."""
    print(PARTS[arguments.part][0](arguments))
    return 0


def _read_descriptions(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from tokenscale.report import summary

    figures = arguments.figures
    return [summary.read(figures / name / summary.FILE) for name in arguments.experiments]


def _list_copied_files(arguments: argparse.Namespace) -> dict[str, Path]:
    return {name: getattr(arguments, name) for name in ("ledger", "workflow", "citation")}


def _build_figure(arguments: argparse.Namespace) -> str:
    from tokenscale.report import save
    from tokenscale.report.figure import figure_class

    figure_class(arguments.name)  # report a misspelt name before a missing table
    output = arguments.output
    if output.suffix[1:] in save.KINDS:  # fig.svg: the name of one of the files
        output = output.with_suffix("")
    paths = save.save(arguments.name, arguments.tables, output)
    return f"{output}.{{{','.join(p.suffix[1:] for p in paths)}}}"


def _describe_experiment(arguments: argparse.Namespace) -> Path:
    from tokenscale.report import summary

    folder = arguments.tables
    summary.write(folder.name, folder.parent, path=arguments.output)
    return arguments.output


def _build_page(arguments: argparse.Namespace) -> str:
    from tokenscale.report import page

    experiments = arguments.experiments
    if arguments.of_several and len(experiments) > 1:
        what = "--of-several is the page of one experiment."
        next_step = f"--experiments {experiments[0]}"
        raise UserError(what, found=" ".join(experiments), next=next_step)
    parts = _read_descriptions(arguments)
    if arguments.of_several:
        page.write_experiment(parts[0], arguments.figures, arguments.output)
        return str(arguments.output)
    page.write(parts, arguments.figures, arguments.output, claims=arguments.claims)
    return "\n".join([str(arguments.output), *_summarize(parts)])


def _summarize(parts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the verdicts of a report's answers in a line, then its cautions, a line each."""
    from tokenscale.report.summary import list_cautions

    verdicts: dict[str, dict[str, None]] = {}
    for answer in (answer for part in parts for answer in part["answers"]):
        verdicts.setdefault(answer["verdict"], {})[answer["part"]] = None
    found = "; ".join(f"{verdict}: {', '.join(named)}" for verdict, named in verdicts.items())
    yield f"answers  {found or 'none: nothing in it can be compared'}"
    cautions = list(dict.fromkeys(text for part in parts for text in list_cautions(part)))
    yield from (f"caution  {text}" for text in cautions[:CAUTIONS])
    if (more := len(cautions) - CAUTIONS) > 0:
        yield f"         {more} more on the page"


def _build_pdf(arguments: argparse.Namespace) -> Path:
    from tokenscale.report import pdf

    parts = _read_descriptions(arguments)
    pdf.write(parts, arguments.figures, arguments.output, claims=arguments.claims)
    return arguments.output


def _build_bundle(arguments: argparse.Namespace) -> str:
    from tokenscale.report import bundle

    output = arguments.output
    options: dict[str, Any] = {
        "also": tuple(arguments.also),
        "logs": not arguments.no_logs,
        **_list_copied_files(arguments),
    }
    parts = _read_descriptions(arguments)
    logs = bundle.write(parts, arguments.tables, arguments.figures, output, **options)["logs"]
    size = (
        f"{(output / bundle.LOGS).stat().st_size:,} bytes"
        if "runs" in logs
        else f"left out: {logs['left_out']}"
    )
    return f"{output / bundle.SUMS}\n{output / bundle.LOGS}: {size}"


def _rebuild(arguments: argparse.Namespace) -> str:
    from tokenscale.report import build, claims

    written = build.rebuild(arguments.archive, arguments.output, **_list_copied_files(arguments))
    judged = arguments.output / "report" / build.CLAIMS
    lines = claims.claim_lines(claims.read_claims(judged)) if judged in written else ()
    return "\n".join([*lines, *map(str, written)])


#: part of the report → (what builds it, help)
PARTS: dict[str, tuple[Callable[[argparse.Namespace], Any], str]] = {
    "figure": (
        _build_figure,
        "one figure as SVG, PDF and PNG, its data as CSV and Parquet, its caption as JSON",
    ),
    "description": (
        _describe_experiment,
        "the texts and tables of an experiment as JSON, which page, PDF and bundle read",
    ),
    "page": (
        _build_page,
        (
            "the first page: verdicts and claims, and a sole experiment in full; prints answers "
            "and cautions"
        ),
    ),
    "pdf": (_build_pdf, "the report as PDF"),
    "bundle": (
        _build_bundle,
        (
            "the report's folder: figures, data, SQL, tables, provenance and checksums beside "
            "page and PDF"
        ),
    ),
    "rebuild": (_rebuild, "tables, claims and report from the packed logs of a report"),
}
