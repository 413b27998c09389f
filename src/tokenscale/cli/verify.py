"""Is a figure, a page or a report what its data and code draw? Are results what was written, every byte of them?

Of reports it says identical, data changed, code changed or not ours; of results, each file that is not as it was.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and where the tables are."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a figure (SVG, PDF, PNG), report.pdf or pages cut out of it, a report's folder or its SHA256SUMS; or a "
        "folder of results, whose stores, weights and logs are read",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with the tables to draw from")
    ledger = Path("config/claims.yaml")
    parser.add_argument("--ledger", type=Path, default=ledger, metavar="FILE", help="the claims, to judge them again")


def run(arguments: argparse.Namespace) -> int:
    """Print what is found; 0 where everything is as it was, else 1."""
    from tokenscale.cli import verify_results as results

    wrong = False
    reports = [path for path in arguments.files if not results.is_results(path)]
    for path in arguments.files:
        if path not in reports:
            found, counts = results.verify_results(path)
            print(results.text(path, found, counts))
            wrong |= any(not finding.note for finding in found)
    if reports:
        from tokenscale.report.verification import verify
        from tokenscale.report.verification_findings import IDENTICAL, text

        where = (arguments.results, arguments.ledger)
        drawn = [finding for path in reports for finding in verify(path, *where)]
        print(text(drawn))
        wrong |= any(finding.verdict != IDENTICAL for finding in drawn)
    return int(wrong)
