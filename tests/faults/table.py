"""The table of faults in docs/operations.md: what is injected, what happens then, and what the tests reported.

python -m tests.faults.table --run      run the tests that its rows name; outcomes go to evidence/faults/tests.jsonl
                             --run tests/faults/test_kills.py    the same of some
python -m tests.faults.table --write    put the numbers, as evidence has them, into the rows
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import campaign

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations.md"
TESTS = ROOT / "evidence/faults/tests.jsonl"
KILLS = ROOT / "evidence/faults/kills.jsonl"
MARK = "<!-- faults -->"
MARK_OF_KILLS = "<!-- kills -->"


class Outcomes:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails before or after its call has failed."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def tests_of(row: str) -> list[str]:
    """The tests in the last cell of a row: a file, or some of a file by their names."""
    found = re.findall(r"`(.*?)`", row.rsplit("|", 2)[1])
    return [name if name.startswith("tests/") else f"{found[0].partition('::')[0]}::{name}" for name in found]


def rows(page: str) -> list[str]:
    return [line for line in page.split(MARK)[1].splitlines()[3:] if line]


def run(beginning: str) -> int:
    """Run the table's tests whose names begin so; returns pytest's exit code. Outcomes of the others stay."""
    plugin = Outcomes()
    named = [test for row in rows(PAGE.read_text()) for test in tests_of(row)]
    for test, outcome in outcomes().items():
        if not test.startswith(beginning) and any(belongs(test, name) for name in named):
            plugin.found[test] = outcome
    asked = [str(ROOT / test) for test in named if test.startswith(beginning)]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *asked], plugins=[plugin])
    lines = [json.dumps({"test": test, "outcome": outcome}) for test, outcome in sorted(plugin.found.items())]
    TESTS.write_text("".join(f"{line}\n" for line in lines))
    return int(code)


def outcomes() -> dict[str, str]:
    return {row["test"]: row["outcome"] for row in campaign.read(TESTS)}


def belongs(test: str, named: str) -> bool:
    """Whether a test, by pytest's name for it, is one of those that a row names."""
    return test.split("[")[0] == named or test.startswith(f"{named}::")


def counted(row: str) -> str:
    """A row with its numbers. Injected: tests that ran, of each of its values one; survived: those that passed."""
    ended = Counter(o for test, o in outcomes().items() if any(belongs(test, named) for named in tests_of(row)))
    ran = ended["passed"] + ended["failed"]
    *cells, _, _, tests, _ = row.split("|")
    return "|".join([*cells, f" {ran or 'not run'} ", f" {ended['passed']} ", tests, ""])


def written(page: str) -> str:
    """The page with both tables as the evidence has them."""
    for row in rows(page):
        page = page.replace(row, counted(row))
    before, _, after = page.split(MARK_OF_KILLS)
    return f"{before}{MARK_OF_KILLS}\n{campaign.table(campaign.read(KILLS))}\n{MARK_OF_KILLS}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="?", const="", metavar="BEGINNING", help="of tests' names; without it all")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.run is not None:
        raise SystemExit(run(asked.run))
    if asked.write:
        PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
