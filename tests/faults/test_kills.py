"""A kill of every rule, and of Snakemake: the next call ends well, and holds what an undisturbed build holds."""

import json
import shutil

import pytest

from tests.faults.campaign import TRIES, campaign, table
from tests.faults.kills import SIGNALS, VICTIMS, WHOLE, Kill, Lab, drawn, lies_in, trial

EACH = [*VICTIMS, *WHOLE]
#: what a campaign kills, too, and what is killed here in the same way: another format, another page
LEFT_OUT = ("format padded", "format token-list", "format archive", "claims", "page", "PDF")


@pytest.mark.parametrize("victim", [victim for victim in EACH if victim not in LEFT_OUT])
def test_the_next_call_makes_what_an_undisturbed_one_makes(stages, victim, tmp_path):
    """Each victim once; the signals in turn."""
    number = EACH.index(victim)
    kill = drawn(number + len(EACH) * (number % len(SIGNALS)), seed=1)
    assert kill.victim == victim
    for attempt in range(TRIES):
        row = trial(stages, Kill(**{**vars(kill), "moment": kill.moment / 2**attempt}), tmp_path / "trial", seed=1)
        assert not row["lost"], json.dumps(row, indent=1).replace("\\n", "\n")
        if row["injected"]:
            return
    pytest.fail(f"{kill.victim} always ended before its signal")


def test_a_loss_of_each_kind_is_seen(stages, tmp_path):
    whole = lies_in(stages.folder / "end/project")
    assert whole == stages.expected
    copy = tmp_path / "copy"
    shutil.copytree(stages.folder / "end/project/results", copy / "results", symlinks=True)
    shard = next((copy / "results/tokens").rglob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    steps = next((copy / "results/runs").glob("*/attempt=*/rank=*/steps.jsonl"))
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    next((copy / "results/runs").rglob("final/*.safetensors")).write_bytes(b"")
    (copy / "results/report/.index.html.node-7.tmp").write_text("half")
    (copy / "results/report/report.pdf").unlink()
    found = lies_in(copy)
    changed = {name for name in whole if name in found and found[name] != whole[name]}
    assert {name.split("/")[0].split(" of ")[0] for name in changed} == {"tokens", "steps", "runs"}
    assert found.keys() - whole.keys() == {"report/.index.html.node-7.tmp"}
    assert whole.keys() - found.keys() == {"report/report.pdf"}


def test_the_table_counts_what_was_injected(tmp_path):
    row = {"victim": "page", "signal": "SIGTERM", "injected": True, "lost": []}
    rows = [row, row | {"lost": ["missing: x"]}, row | {"injected": False}, row | {"victim": "Snakemake"}]
    assert "| page | 0 | 2 | 0 | 1 | 1 |" in table(rows)
    assert "| together | 0 | 3 | 0 | 2 | 1 |" in table(rows)


def test_a_campaign_goes_on_where_its_log_ends(tmp_path, monkeypatch):
    def injected(lab, kill, folder, seed):
        return {"number": kill.number, "victim": kill.victim, "signal": kill.signal, "injected": True, "seconds": 0} | {
            "lost": []
        }

    monkeypatch.setattr("tests.faults.campaign.trial", injected)
    monkeypatch.setattr(Lab, "made", lambda self: None)
    log = tmp_path / "kills.jsonl"
    campaign(log, 3, 0, tmp_path)
    assert [row["number"] for row in campaign(log, 5, 0, tmp_path)] == [0, 1, 2, 3, 4]
    assert len(log.read_text().splitlines()) == 5
