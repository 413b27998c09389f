"""Compare two sets of runs of any trainer: throughput and loss, in pairs of repeats, by the statistics of a
report.

A run is a folder of results/runs, or a log that `golden` reads; `FILE::NAME` chooses a run or column.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenscale.base.errors import UserError, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="A", help="runs of one trainer, a repeat each")
    parser.add_argument(
        "--over",
        nargs="+",
        required=True,
        metavar="B",
        help="those of the other, in the same order",
    )
    parser.add_argument("--names", nargs=2, metavar=("A", "B"), help="what to call them")
    text = "sequences of an optimizer step, over all devices (for logs)"
    parser.add_argument("--global-batch", type=int, metavar="N", help=text)
    parser.add_argument(
        "--sequence-length", type=int, metavar="T", help="tokens of a sequence (for logs)"
    )
    parser.add_argument("--devices", type=int, metavar="D", help="devices of a run (for logs)")
    text = "unit of times or rates whose name in the log has none: s, ms, tokens/s, samples/s, …"
    parser.add_argument("--time-unit", metavar="UNIT", help=text)
    text = "compare throughput or loss alone (default: both); fewer take fewer runs"
    parser.add_argument("--quantity", nargs="+", metavar="NAME", help=text)
    text = "also write runs, tables and report, laid out like results/"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Print verdicts and cautions, and write the report."""
    try:
        from tokenscale.report import build, run_sets, summary
    except ModuleNotFoundError as error:
        raise UserError(
            "a package is not installed.", reason=error, next="pip install packages/golden"
        ) from None
    from tokenscale.report.packed_logs import check_replaceable, put_in_place

    quantities = dict.fromkeys(arguments.quantity or run_sets.JUDGED_QUANTITIES)
    for name in quantities.keys() - run_sets.JUDGED_QUANTITIES.keys():
        raise unknown("quantity", word=name, words=run_sets.JUDGED_QUANTITIES)
    units = (*run_sets.TIMES, *run_sets.RATES)
    if arguments.time_unit not in (None, *units):
        raise unknown("unit", word=arguments.time_unit, words=units)

    if arguments.output is not None:
        check_replaceable(arguments.output)
    sets = run_sets.name_sets([arguments.runs, arguments.over], names=arguments.names or ())
    declared = run_sets.DeclaredFacts(
        global_batch=arguments.global_batch,
        sequence_length=arguments.sequence_length,
        devices=arguments.devices,
        time_unit=arguments.time_unit,
    )
    with TemporaryDirectory() as temporary:
        made = Path(temporary)
        tables = run_sets.write_tables(sets, list(quantities), declared, results=made)
        lines = [*run_sets.describe(run_sets.compare(tables))]
        cautions = summary.list_cautions(summary.experiment(run_sets.NAME, tables.parent))
        lines += [f"caution     {text}" for text in cautions]
        if arguments.output is not None:
            folders = (made / name for name in ("tables", "figures", "report"))
            build.write([run_sets.NAME], *folders)
            put_in_place(made, arguments.output)
            lines.append(str(arguments.output / "report/index.html"))
    print("\n".join(lines))
