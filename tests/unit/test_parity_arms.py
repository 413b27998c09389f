"""Parity certificates of nanoGPT, litgpt and transformers with one line of their installed code
changed.
"""

import os
import time
from pathlib import Path

import pytest

from tests.arm_cases import TABLES, ArmReferences, find_records, score_golden
from tests.long import logs
from tests.parity_cases import run
from tokenscale.arms.environments import BUNDLES, prepare
from tokenscale.base.files import read_json
from tokenscale.parity.comparison import EQUAL, ROUNDING

pytestmark = [pytest.mark.slow(600), pytest.mark.long]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Certificates of all cases: planted differences and refactorings, each with result and
    cause.
    """
    if not (os.environ.get(BUNDLES) or os.environ.get("TOKENSCALE_ARM_REMOTES") == "1"):
        pytest.skip(
            f"set {BUNDLES} to a folder of bundles, or TOKENSCALE_ARM_REMOTES=1 to read the "
            "repositories"
        )
    folder = tmp_path_factory.mktemp("arms")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        records = find_records()
        for arm, record in records.items():
            if not record.is_file() or read_json(record)["error"] is not None:
                records[arm] = folder / "environments" / arm / record.name
                assert prepare(arm, records[arm])["error"] is None
        began = time.monotonic()
        references = ArmReferences(folder, records)
        found = {title: list(run(cases, references)) for title, cases in TABLES.items()}
    lines = [
        f"{case.model}: {case.name}: {result}: {cause}: from losses alone {kind}"
        for rows in found.values()
        for case, result, cause, kind in rows
    ]
    logs.write("parity-arms", "\n".join([*lines, f"{time.monotonic() - began:.0f} s"]) + "\n")
    return found


@pytest.mark.parametrize(
    "title, expected, share",
    [
        ("planted difference", ("named", "found"), 1),
        ("planted difference", ("named",), 0.85),
        ("refactoring", (EQUAL, ROUNDING), 1),
    ],
)
def test_planted_differences_are_found_and_most_are_named_and_no_refactoring_is_an_alarm(
    results, title, expected, share
):
    rows = results[title]
    others = [
        (case.model, case.name, result, cause)
        for case, result, cause, _ in rows
        if result not in expected
    ]
    assert len(rows) - len(others) >= share * len(rows) > 0, others


def test_losses_alone_show_the_kind_or_too_little(results):
    rows = results["planted difference"]
    wrong = [case.name for case, *_, kind in rows if score_golden(case, kind) == "wrong"]
    assert len(wrong) <= 0.1 * len(rows), wrong
    assert all(score_golden(case, kind) == "right" for case, *_, kind in results["refactoring"])
