"""The benchmark of the way from logs to numbers: both sides answer alike, and a difference is refused."""

import json
import subprocess
import sys

import pytest
from benchmarks import analysis

from tokenscale.analysis.ingest import ingest
from tokenscale.base.errors import UserError

pytestmark = pytest.mark.experiment


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """25 logs of 300 steps and their tables."""
    root = tmp_path_factory.mktemp("analysis")
    size = analysis.make(root, 1, 300)
    assert size == sum(path.stat().st_size for path in root.glob("runs/*/*/*/steps.jsonl"))
    ingest(root / "runs.json", root / "runs", root / analysis.TABLES)
    return root


@pytest.mark.parametrize("question", analysis.QUESTIONS)
def test_the_query_and_pandas_give_the_same(lab, question):
    for side in ("", "pandas "):
        (lab / f"{side}{question}.json").write_text(json.dumps(analysis.answer(f"{side}{question}", lab)["answer"]))
    answers = [json.loads((lab / f"{side}{question}.json").read_text()) for side in ("", "pandas ")]
    assert answers[0] == pytest.approx(answers[1], rel=1e-9) and len(answers[0]) == 10
    assert len(set(answers[0].values())) > 2


def test_different_answers_are_refused(lab, tmp_path):
    for question in analysis.QUESTIONS:
        for side in ("", "pandas "):
            (tmp_path / f"{side}{question}.json").write_text('{"a": 1.0}')
    analysis._compare(tmp_path)
    (tmp_path / "pandas scaling.json").write_text('{"a": 1.000001}')
    with pytest.raises(UserError, match="answer differently"):
        analysis._compare(tmp_path)


def test_runs_are_valid_and_an_arm_is_timed_as_a_process(lab, capsys):
    import pyarrow.parquet as pq

    assert set(pq.read_table(lab / analysis.TABLES / "runs.parquet")["validity"].to_pylist()) == {"valid"}
    found = analysis._arm(lab, "ingest", 1)
    assert found["seconds"] > 0 and found["cpu_s"] > 0 and found["peak_bytes"] > 1e6
    assert (lab / analysis.TABLES / "steps.parquet").is_file()


def test_memory_is_that_of_all_processes_of_a_group():
    hold = "held = b'x' * 100_000_000; print(flush=True); input()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-c", hold], process_group=0, **options)
    first.stdout.readline()
    alone = analysis.held_bytes(first.pid)
    second = subprocess.Popen([sys.executable, "-c", hold], process_group=first.pid, **options)
    second.stdout.readline()
    together = analysis.held_bytes(first.pid)
    for process in (first, second):
        process.communicate(b"\n")
    assert 1e8 < alone < 1.5e8 and alone + 1e8 < together < 3e8
    assert analysis.held_bytes(first.pid) == 0


def test_numbers_of_logs_that_make_no_whole_repeat_are_refused():
    with pytest.raises(UserError, match="whole repeats"):
        analysis.measure(None, logs=30)


@pytest.mark.parametrize("few", [{"steps": 3}, {"rounds": 0}, {"threads": 0}])
def test_numbers_that_leave_nothing_to_measure_are_refused(few):
    with pytest.raises(UserError, match="leave nothing to measure"):
        analysis.measure(None, logs=25, **{"steps": 4, **few})


def test_the_table_has_a_line_an_arm_and_ratios():
    def record(arm, number, seconds):
        return {"arm": arm, "round": number, "seconds": seconds, "cpu_s": 1.0, "peak_bytes": 2e8}

    records = [record(a, n, 20.0 + n if "pandas" in a else 0.5) for n in range(3) for a in analysis.ARMS]
    result = {"logs": 25, "steps": 10, "bytes": 5e6, "parquet_bytes": 1e6, "threads": 2, "records": records} | {
        "figures": 27
    }
    text = analysis.table(result)
    assert "scaling: 42.0 (40.0–44.0) times faster than pandas" in text
    assert "report: 27 figures" in text
    assert text.count("\n") == len(analysis.ARMS) + 6
