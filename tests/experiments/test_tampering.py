"""Tamperings of a mailed report, with the commands that ship."""

import re

import pytest

from tests import logs
from tests.experiments.test_report_folder import FIGURE, report
from tests.logs import tabulate
from tests.once import once
from tests.tampering import ALL, command, rebuild, seal, tamper
from tokenscale.base.files import read_json
from tokenscale.settings.experiments import digest_design

pytestmark = [pytest.mark.experiment, pytest.mark.slow(50)]

CELLS = [f"approach={name}, layout.data=1" for name in ("packed", "padded")]
PRIMARY = {
    "of": CELLS[0],
    "over": CELLS[1],
    "names": ["approach=packed", "approach=padded"],
    "at": "layout.data=1",
    "factor": "approach",
    "quantity": "useful_tokens_per_s",
    "margin": None,
}
#: what the gate tries
QUICK = ("page, release and README", "tokens, as if checked")


@pytest.fixture(scope="module")
def mailed(tmp_path_factory):
    """The report of registered runs that are all valid. Nobody may change it."""

    def make(folder):
        table = logs.write_demo(
            folder,
            approaches=("padded", "packed"),
            figures=[FIGURE],
            primary=[PRIMARY],
            cell_repeats=dict.fromkeys(CELLS, 3),
        )
        design = digest_design(read_json(table))
        for record in folder.glob("runs/*/run.json"):
            seal(record.parent, designs={"demo": design})
        tabulate(table, folder / "runs", folder / "tables/demo", [folder / "bench.json"])
        report(folder)

    return once(tmp_path_factory, "mailed-report", make) / "report"


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ALL]
)
def test_what_follows_from_logs_is_named_and_a_whole_forgery_verifies(mailed, tmp_path, name):
    """As docs/report.md says, only a signature helps against a whole forgery."""
    tampering = ALL[name]
    folder = tamper(mailed, tampering, tmp_path)
    code, text = command("verify", folder)
    assert code == 1, text
    if tampering.says is None:
        return
    whole = rebuild(folder, tmp_path / "whole")
    code, text = command("verify", whole)
    assert code == 0 and "tokens are not counted again" in text, text
    assert tampering.says in (whole / "index.html").read_text()


def test_an_untouched_report_agrees(mailed):
    code, text = command("verify", mailed)
    assert code == 0 and text.count(": agrees\n") == 4
    assert not re.search("(invalid|suspect) of 12 runs", (mailed / "index.html").read_text())
