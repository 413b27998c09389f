"""What a run came to, as `train` tells it from the run's records."""

import json

import pytest

from tokenscale.runs.records import outcome, provenance


def test_an_outcome_sums_ranks_and_leaves_out_the_first_step_and_what_is_not_finite(tmp_path):
    record = provenance.start(tmp_path, {"attempt": 1})
    for rank in range(2):
        folder = tmp_path / f"attempt=01/rank={rank:05d}"
        folder.mkdir(parents=True)
        steps = [(9.0, 1, 5.0), (8.0, 3, 1.0 + rank), (6.0, 1, 1.0), (None, 1, 1.0)]
        lines = [
            {"step": k, "loss_sum": loss, "useful_tokens": n, "total_tokens": 4, "step_s": s, "nonfinite": loss is None}
            for k, (loss, n, s) in enumerate(steps)
        ]
        (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert outcome.outcome(tmp_path) is None and "not sealed" in outcome.told(tmp_path)[0]
    provenance.seal(tmp_path, record, {"status": "nonfinite", "steps": 3})
    found = outcome.outcome(tmp_path)
    assert (found["loss"], found["status"], found["held_out_loss"]) == (6.0, "nonfinite", None)
    assert found["useful_tokens_per_s"] == pytest.approx((3 + 3 + 1 + 1) / (2.0 + 1.0))
    assert found["total_tokens_per_s"] == pytest.approx(16 / 3)
