"""Tokens per second have one definition: what `train`, `status`, the trackers and the report print
is equal.
"""

import json
import re
from contextlib import closing
from pathlib import Path

import pyarrow.compute as pc
import pytest

from tokenscale.analysis import live
from tokenscale.analysis.logs import merge, read_run
from tokenscale.runs.records import provenance

PACKAGE = Path(live.__file__).parents[1]
#: a division of tokens by seconds, in Python or SQL
DIVISION = re.compile(
    r"tokens\w*[\"'\])]*\)?(?:\.\w+\(\))?\s*/\s*[^\n]{0,30}(?:step_s|seconds|duration|_time\b)"
)
#: the definition; and rates that are not of a run's steps: writing a store, predictions
OTHERS = {"analysis/sql/macros.sql", "referee/projection.py"}
#: (sum of losses, useful tokens, seconds) of steps
STEPS = [(9.0, 1, 50.0), (8.0, 3, 9.0), (6.0, 1, 7.0), (6.0, 3, 1.0), (5.0, 1, 1.0), (None, 1, 1.0)]


def write_logs(folder, steps=STEPS):
    """Logs of two ranks, of which the second one is slower in step 3."""
    for rank in range(2):
        path = folder / f"attempt=01/rank={rank:05d}"
        path.mkdir(parents=True)
        lines = [
            {
                "step": k,
                "loss_sum": loss,
                "useful_tokens": n,
                "total_tokens": 4,
                "step_s": s + rank * (k == 3),
            }
            | {"nonfinite": loss is None}
            for k, (loss, n, s) in enumerate(steps)
        ]
        (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_summary_sums_ranks_and_leaves_out_warm_up_and_what_is_not_finite(tmp_path):
    record = provenance.start_record(tmp_path, {"attempt": 1})
    write_logs(tmp_path)
    assert live.run_summary(tmp_path) is None and "not sealed" in live.summary_lines(tmp_path)[0]
    provenance.seal_record(tmp_path, record, {"status": "nonfinite", "steps": 5})
    found = live.run_summary(tmp_path)
    assert (found["loss"], found["status"], found["held_out_loss"]) == (5.0, "nonfinite", None)
    assert found["useful_tokens_per_s"] == pytest.approx((3 + 3 + 1 + 1) / (2.0 + 1.0))
    assert found["total_tokens_per_s"] == pytest.approx(16 / 3)
    now = live.current_throughput(tmp_path / "attempt=01")
    assert now == {"step_s": pytest.approx(1.5), "useful_tokens_per_s": pytest.approx(8 / 3)}


def test_a_run_within_its_warm_up_has_no_speed(tmp_path):
    record = provenance.start_record(tmp_path, {"attempt": 1})
    write_logs(tmp_path, steps=[(2.0, 1, 1.0)])
    provenance.seal_record(tmp_path, record, {"status": "complete", "steps": 1})
    assert live.run_summary(tmp_path)["useful_tokens_per_s"] is None
    assert "not measured" in live.summary_lines(tmp_path)[-1]
    assert live.current_throughput(tmp_path / "attempt=01") is None


def test_no_other_file_divides_tokens_by_seconds():
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.sql")]
    outside = [path for path in files if path.relative_to(PACKAGE).parts[0] != "benchmark"]
    found = {
        str(path.relative_to(PACKAGE)): DIVISION.findall(path.read_text(encoding="utf-8"))
        for path in outside
    }
    assert DIVISION.search("sum(total_tokens) / sum(step_s)") and DIVISION.search(
        'kept["useful_tokens"] / seconds'
    )
    assert {name for name, hits in found.items() if hits} <= OTHERS


def test_of_a_step_that_a_log_has_twice_the_last_line_counts_as_in_the_tables(tmp_path):
    write_logs(tmp_path, steps=[(9.0, 1, 1.0)] * 8)
    for path in tmp_path.glob("attempt=01/rank=*/steps.jsonl"):
        lines = path.read_text().splitlines()
        again = json.loads(lines[5]) | {"useful_tokens": 2045}
        path.write_text("".join(f"{line}\n" for line in [*lines, json.dumps(again)]))
    with closing(live.connect_logs(tmp_path)) as connection:
        [(useful,)] = connection.execute("SELECT sum(useful_tokens) FROM steps").fetchall()
    log = read_run(tmp_path, "run", digest=None)
    assert useful == pc.sum(merge(log.steps, log.events)["useful_tokens"]).as_py() == 2 * (7 + 2045)
