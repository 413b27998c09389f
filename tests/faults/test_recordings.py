"""A kill while a parity recording or a certificate is made: made again, both equal those that
nobody disturbed.
"""

import json
import subprocess
import sys
import time

import pytest

from tests.faults.test_resume import run_of, wait_for
from tests.refusals import tree_of
from tokenscale.cli.main import main
from tokenscale.settings.run import BudgetSettings, CheckpointSettings, ValidationSettings


def start(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "tokenscale", *words], stdout=subprocess.PIPE)


@pytest.mark.long
def test_the_next_call_makes_what_an_undisturbed_one_makes(lab, tmp_path, capsys):
    """The recorded process outlives the command that is killed: the next one waits for its end."""
    none = {"validation": ValidationSettings(rows=0), "checkpoints": CheckpointSettings()}
    run = run_of(
        labels="stream", packing="concatenate", device="cpu", budget=BudgetSettings(steps=6), **none
    )
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    words = [
        "arm_record",
        "--run",
        run.to_json(),
        "--store",
        str(lab.store(run.store) / "manifest.json"),
        "--output",
    ]
    assert main([*words, str(whole / "outcome.json")]) == 0
    assert json.loads((whole / "outcome.json").read_text()) == {"reason": None}
    killed = start([*words, str(cut / "outcome.json")])
    wait_for(killed, (cut / "steps.jsonl").exists)
    killed.kill()
    killed.wait()
    assert main([*words, str(cut / "outcome.json")]) == 0
    assert "is being written by process" in capsys.readouterr().out
    assert tree_of(cut) == tree_of(whole)
    words = ["parity", str(whole), str(cut), "--output"]
    certificates = tmp_path / "certificates"
    assert main([*words, str(certificates / "whole")]) == 0
    killed = start([*words, str(certificates / "cut")])
    time.sleep(2)
    killed.kill()
    killed.communicate()
    assert main([*words, str(certificates / "cut")]) == 0
    found = tree_of(certificates)
    assert found.keys() == {"whole", "cut"} and found["cut"] == found["whole"]
    assert json.loads(found["cut"])["verdict"] == "equal"
