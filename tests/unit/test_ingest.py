"""Logs → tables: broken lines, attempts, validity, equal bytes."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import logs
from tests.logs import tabulate
from tokenscale.analysis import ingest as module
from tokenscale.analysis import logs as reader
from tokenscale.analysis.logs import merge
from tokenscale.analysis.runs import grouping
from tokenscale.analysis.tables import TABLES, of_rows, schema
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, write_json, write_sealed
from tokenscale.runs.records.events import VERSION
from tokenscale.runs.records.provenance import DESIGNS, INDEX, find_designs, seal_record
from tokenscale.settings.experiments import digest_design

GOOD = b'{"schema":1,"step":%d,"step_s":0.1}'
LINES = b"".join(GOOD % i + b"\n" for i in range(99))


@pytest.mark.parametrize(
    ("content", "good", "bad", "benign"),
    [
        (LINES + b'{"schema":1,"st', 99, 1, 1),
        (LINES + GOOD % 99, 100, 0, 0),
        (b"", 0, 0, 0),
        (b'{"schema":1,"st', 0, 1, 1),
        (LINES + b"\0" * 4096, 99, 1, 1),
        (LINES + b"\0" * 10 + b"\n" + GOOD % 99 + b"\n", 100, 1, 0),
        (LINES + b'{"sch' + GOOD % 99 + b"\n" + GOOD % 100 + b"\n", 100, 1, 0),
        (LINES + b'{"step":99,"loss_sum":NaN}\n', 100, 0, 0),
        (LINES + b'{"step":99,"new":[1]}\n', 100, 0, 0),
        (LINES + b'{"step":"99"}\n', 99, 1, 0),
        (LINES + b'{"step":true}\n', 99, 1, 0),
        (LINES + b'{"step":99,"rows":9223372036854775808}\n', 99, 1, 0),
        (LINES + b'{"schema":1}\n', 99, 1, 0),
        (LINES + b"[1]\n", 99, 1, 0),
        (LINES + b'{"schema":%d,"step":99}\n' % (VERSION + 1), 99, 1, 0),
        (LINES + b'{"step":\xff}\n', 99, 1, 0),
        (LINES + b"[" * 100_000 + b"\n", 99, 1, 0),
    ],
    ids=range(17),
)
def test_every_line_is_a_row_or_counted_as_broken(tmp_path, content, good, bad, benign):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    lines = reader.read_lines(path, "steps")
    assert (len(lines.rows), len(lines.broken), sum(b["benign"] for b in lines.broken)) == (
        good,
        bad,
        benign,
    )
    assert all(row["step"] is not None for row in lines.rows)
    assert all(len(b["text"]) <= 500 and b["text"].isprintable() for b in lines.broken)


def rows(tables: Path, name: str) -> list[dict]:
    read = logs.read_runs(tables) if name == "runs" else pq.read_table(tables / f"{name}.parquet")
    return read.to_pylist()


def test_what_launchers_recorded_of_all_attempts_is_in_the_table(tmp_path):
    run, shared, damaged = (logs.settings(steps=10, repeat=repeat) for repeat in range(3))
    logs.write_run(tmp_path / "runs", run, attempts=[{"stop": 6, "stopped": False}, {"start": 6}])
    logs.write_run(
        tmp_path / "runs", shared, attempts=[{"stop": 6, "stopped": False}, {"start": 6}]
    )
    logs.write_run(tmp_path / "runs", damaged)
    launched = [(run, 0, "45", 1), (run, 1, "51", 1), (shared, 0, "45", 4), (shared, 1, "52", 4)]
    for one, attempt, job, share in launched:
        found = {
            "id": job,
            "nodes": ["nid1", "nid2"],
            "queue_s": None if job == "52" else 30.0,
            "log": f"rule_train/{job}.log",
        }
        path = tmp_path / "runs" / one.identity / f"attempt={attempt:02d}/attempt.json"
        write_sealed(
            path, {"digest": "d" * 64, "launch": {"machine": "alps", "share": share, "job": found}}
        )
    (tmp_path / "runs" / damaged.identity / "attempt=00/attempt.json").write_text('{"launch": ')
    found = {
        row["repeat"]: row for row in rows(logs.ingested(tmp_path, [run, shared, damaged]), "runs")
    }
    names = ("machine", "node_names", "job_ids", "queue_s", "slurm_logs")
    expected = ["alps", "nid1, nid2", "45, 51", 60, "rule_train/45.log, rule_train/51.log"]
    assert [found[0][name] for name in names] == expected
    assert [found[n]["validity"] for n in range(3)] == ["valid"] * 3
    assert "up to 4 runs had its node at once" in found[1]["cautions"]
    assert found[1]["queue_s"] is None, "one wait is unknown"
    assert found[2]["job_ids"] is None


def test_the_latest_attempt_wins_step_by_step(tmp_path):
    run = logs.settings(world_size=2, steps=10)
    logs.write_run(tmp_path / "runs", run, attempts=[{"stop": 6, "stopped": False}, {"start": 4}])
    tables = logs.ingested(tmp_path, [run])
    (row,) = rows(tables, "runs")
    assert (row["validity"], row["attempts"], row["steps_seen"], row["overlap_rows"]) == (
        "valid",
        2,
        10,
        4,
    )
    steps = rows(tables, "steps")
    assert [s["attempt"] for s in steps if s["rank"] == 0] == [0] * 4 + [1] * 6
    assert [s["attempt_step"] for s in steps if s["rank"] == 1] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def change(**fields):
    return lambda line: line | (fields if line["step"] == 3 else {})


@pytest.mark.parametrize(
    ("attempts", "edit", "kind", "reason"),
    [
        (None, change(step_s=0.0), "steps", "a step that took no time"),
        (None, change(t_mono_s=1.0), "steps", "the monotonic clock goes back"),
        (None, lambda line: None, "steps", "its logs hold no step"),
        (
            None,
            lambda e: e | {"world_size": 4} if "world_size" in e else e,
            "events",
            "observed world size 4, asked",
        ),
        (
            [{"diverges": 5}],
            change(rows=7),
            "steps",
            "at step 5 of 12; ranks hold 7 rows at step 3",
        ),
    ],
)
def test_what_a_log_cannot_carry_is_said(tmp_path, attempts, edit, kind, reason):
    run = logs.settings(world_size=1)
    logs.edit(logs.write_run(tmp_path / "runs", run, attempts=attempts), edit, kind)
    (row,) = rows(logs.ingested(tmp_path, [run]), "runs")
    assert row["validity"] == "invalid" and reason in row["reasons"]


def of_digest(folder: Path, attempt: int, digest: str) -> None:
    write_sealed(folder / f"attempt={attempt:02d}" / "attempt.json", {"digest": digest})


def test_attempts_of_other_code_or_inputs_are_kept_apart(tmp_path):
    """Two digests: steps 0 to 5 are of old code, and the new code's attempt did not begin at 0."""
    run = logs.settings(world_size=2, steps=10)
    folder = logs.write_run(
        tmp_path / "runs", run, attempts=[{"stop": 6, "stopped": False}, {"start": 4}]
    )
    of_digest(folder, 0, "e" * 64)
    of_digest(folder, 1, "d" * 64)  # the record's
    tables = logs.ingested(tmp_path, [run])
    (row,) = rows(tables, "runs")
    assert (row["validity"], row["attempts"], row["steps_seen"], row["overlap_rows"]) == (
        "invalid",
        1,
        6,
        0,
    )
    assert "6 of 10 steps are in the logs of all ranks" in row["reasons"]
    assert (
        {s["attempt"] for s in rows(tables, "steps")}
        == {e["attempt"] for e in rows(tables, "events")}
        == {1}
    )
    told = [
        (a["attempt"], a["superseded"], a["step_rows"], a["merged_rows"])
        for a in rows(tables, "attempts")
    ]
    assert told == [(0, True, 12, 0), (1, False, 12, 12)]


def test_attempts_that_were_set_aside_are_listed_with_their_digest(tmp_path):
    run = logs.settings(steps=10)
    folder = logs.write_run(tmp_path / "runs", run)
    of_digest(folder, 0, "d" * 64)
    logs.write_attempt(folder / "superseded" / "000", run, stop=3, stopped=False)
    of_digest(folder / "superseded" / "000", 0, "c" * 64)
    tables = logs.ingested(tmp_path, [run])
    assert rows(tables, "runs")[0]["validity"] == "valid"
    names = ("folder", "superseded", "digest", "last_step", "merged_rows")
    assert [[attempt[name] for name in names] for attempt in rows(tables, "attempts")] == [
        ["attempt=00", False, "d" * 64, 9, 10],
        ["superseded/000/attempt=00", True, "c" * 64, 2, 0],
    ]


def test_without_a_record_the_newest_attempt_says_which_code_counts(tmp_path):
    run = logs.settings(steps=10)
    folder = logs.write_run(tmp_path / "runs", run, attempts=[{}, {"stop": 4, "stopped": False}])
    for attempt in (0, 1):
        of_digest(folder, attempt, f"{attempt}" * 64)
    record = read_json(folder / "run.json")
    write_json(
        folder / "run.json", {k: v for k, v in record.items() if k not in ("digest", "seal")}
    )
    assert {s["attempt"] for s in rows(logs.ingested(tmp_path, [run]), "steps")} == {1}


def test_two_attempts_at_one_time_are_suspect(tmp_path):
    """By the wall clock; of one boot by the monotonic clock."""
    one = logs.settings(steps=10)
    two = logs.settings(steps=10, repeat=1)
    first = {"stop": 8, "stopped": False}
    logs.write_run(
        tmp_path / "runs", one, attempts=[first, {"start": 4, "t0": 1.7e9 - 999, "boot": None}]
    )
    attempts = [first | {"boot": None}, {"start": 4, "boot_s": 101.0, "boot": None}]
    folder = logs.write_run(tmp_path / "runs", two, attempts=attempts)
    found = {row["repeat"]: row for row in rows(logs.ingested(tmp_path, [one, two]), "runs")}
    assert [found[n]["validity"] for n in (0, 1)] == ["suspect", "valid"]
    assert (
        found[0]["reasons"]
        == "attempt 1 took its first step before an earlier attempt had taken its last"
    )
    for events in folder.glob("attempt=*/rank=*/events.jsonl"):
        events.write_text(events.read_text().replace('"run_start",', '"run_start","boot":"b",'))
    assert rows(logs.ingested(tmp_path, [two]), "runs")[0]["validity"] == "suspect"


def test_more_flops_than_the_devices_can_do_are_no_measurement(tmp_path, monkeypatch):
    run = logs.settings(world_size=2)
    logs.write_run(tmp_path / "runs", run, flops_per_token=None)
    tokens = 12 * run.global_batch * run.sequence_length
    seconds = (12 + 4) * 0.25
    for share, validity in ((2.5, "invalid"), (0.99, "valid")):
        costs = {"peak_flops": 1e12, "flops_per_token": share * 2 * 1e12 * seconds / tokens}
        monkeypatch.setattr(
            module,
            "grouping",
            lambda *given, costs=costs, **named: grouping(*given, **named) | costs,
        )
        (row,) = rows(logs.ingested(tmp_path, [run]), "runs")
        assert row["validity"] == validity, row["reasons"]
        assert row["reasons"] == ("MFU of 250 %: more than the devices can do" if share > 1 else "")


def test_a_run_validated_on_the_training_split_is_invalid(tmp_path):
    (store,) = logs.write_stores(tmp_path, {"packed": 4})
    run = logs.settings()
    logs.write_run(tmp_path / "runs", run, inputs={"validation_store": sha256_file(store)})
    (row,) = rows(logs.ingested(tmp_path, [run], stores=[store]), "runs")
    assert row["validity"] == "invalid" and "training split" in row["reasons"]


IMPOSSIBLE = {
    "schema 9": {"schema": 9},
    "hardware.device ''": {"hardware": logs.HARDWARE | {"device": ""}},
    "hardware.device_kind 'abacus'": {"hardware": logs.HARDWARE | {"device_kind": "abacus"}},
    "hardware.memory_bytes 1": {"hardware": logs.HARDWARE | {"memory_bytes": 1}},
    "hardware.nodes ['a', 'a'": {"hardware": logs.HARDWARE | {"nodes": ["a"] * 99}},
    "git.commit 'zzz'": {"git": {"commit": "zzz", "dirty": False}},
    "digest 'x'": {"digest": "x"},
    "launch.share -1": {"launch": {"share": -1}},
    "must not decrease": {"flops_per_token": {"full": 5e6, "causal": 4e6, "hardware": 1e3}},
    "outcome.stopped_at": {"outcome": {"stopped_at": {"step": 3}}},
    "steps.jsonl (not sealed)": {"outcome": {"logs": {}}},
    "were edited while it trained: train/loop.py": {"outcome": {"code_changed": ["train/loop.py"]}},
}


def test_a_record_that_was_sealed_anew_with_impossible_fields_is_not_valid(tmp_path):
    runs = [logs.settings(repeat=repeat) for repeat in range(len(IMPOSSIBLE))]
    for run, fields in zip(runs, IMPOSSIBLE.values(), strict=True):
        folder = logs.write_run(tmp_path / "runs", run)
        record = read_json(folder / "run.json")
        outcome = record["outcome"] | fields.get("outcome", {})
        logs.provenance.seal_record(
            folder, record | {k: v for k, v in fields.items() if k != "outcome"}, outcome
        )
    found = {row["repeat"]: row for row in rows(logs.ingested(tmp_path, runs), "runs")}
    for repeat, told in enumerate(IMPOSSIBLE):
        assert told in found[repeat]["reasons"], found[repeat]["reasons"]
        assert found[repeat]["validity"] == ("suspect" if "edited" in told else "invalid")


def test_a_record_or_a_log_that_was_edited_later_is_found(tmp_path):
    one = logs.settings()
    two = logs.settings(repeat=1)
    folder = logs.write_run(tmp_path / "runs", one)
    write_json(folder / "run.json", read_json(folder / "run.json") | {"versions": {}})
    folder = logs.write_run(tmp_path / "runs", two)
    record = read_json(folder / "run.json")
    outcome = record["outcome"] | {"logs": {"attempt=00/rank=00000/steps.jsonl": "0" * 64}}
    logs.provenance.seal_record(folder, record, outcome)
    found = {r["repeat"]: r for r in rows(logs.ingested(tmp_path, [one, two]), "runs")}
    assert (found[0]["validity"], found[0]["reasons"]) == (
        "suspect",
        "run.json does not match its seal",
    )
    assert found[1]["validity"] == "invalid"
    assert "logs differ from the hashes" in found[1]["reasons"]


def test_missing_running_and_unreadable_runs_are_listed(tmp_path):
    missing, running, broken, failed = (logs.settings(repeat=r) for r in range(4))
    folder = logs.write_run(tmp_path / "runs", running, status="running")
    write_json(folder / "run.json", logs.unsealed(folder / "run.json"))
    (logs.write_run(tmp_path / "runs", broken) / "run.json").write_text('{"run": ')
    logs.write_run(tmp_path / "runs", failed, status="nonfinite")
    found = {
        r["repeat"]: r
        for r in rows(logs.ingested(tmp_path, [missing, running, broken, failed]), "runs")
    }
    assert [found[r]["validity"] for r in range(4)] == ["missing", "invalid", "invalid", "invalid"]
    assert found[0]["approach"] == "packed"
    for repeat, reason in (
        (1, "has not ended"),
        (2, "not readable JSON"),
        (3, "loss or gradient not finite"),
    ):
        assert reason in found[repeat]["reasons"]


def test_two_runs_that_would_be_one_repeat_of_one_cell_are_refused(tmp_path):
    runs = [logs.settings(sequence_length=length) for length in (512, 1024)]
    with pytest.raises(UserError, match="same repeat of the same cell") as told:
        logs.ingested(tmp_path, runs)
    assert all(run.identity in str(told.value) for run in runs)


def test_nothing_at_all_still_gives_every_table_with_its_columns(tmp_path):
    tables = logs.ingested(tmp_path, [])
    assert all(pq.read_schema(tables / f"{name}.parquet").equals(schema(name)) for name in TABLES)


def test_a_broken_line_is_named_with_its_place_and_a_partial_last_one_is_benign(tmp_path):
    run = logs.settings()
    resumed = logs.settings(world_size=1, steps=10, repeat=1)
    path = logs.write_run(tmp_path / "runs", run) / "attempt=00/rank=00000/steps.jsonl"
    path.write_bytes(b"rubbish\n" + path.read_bytes())
    attempts = [{"stop": 6, "stopped": False}, {"start": 6}]
    path = (
        logs.write_run(tmp_path / "runs", resumed, attempts=attempts)
        / "attempt=00/rank=00000/steps.jsonl"
    )
    path.write_bytes(path.read_bytes() + b'{"schema":1,"ste')
    tables = logs.ingested(tmp_path, [run, resumed])
    found = {row["repeat"]: row for row in rows(tables, "runs")}
    assert [(found[n]["validity"], found[n]["quarantined_benign"]) for n in (0, 1)] == [
        ("suspect", 0),
        ("valid", 1),
    ]
    lines = [(line["file"], line["line"]) for line in rows(tables, "quarantine")]
    assert (f"{run.identity}/attempt=00/rank=00000/steps.jsonl", 1) in lines and len(lines) == 2


@pytest.mark.parametrize(
    ("write", "damage"),
    [
        (logs.write_benchmark, {"records": [{}]}),
        (logs.write_storage_benchmark, {"corpus": None, "settings": None}),
        (logs.write_inference_benchmark, {"models": []}),
        (logs.write_inference_benchmark, {"generations": [{}]}),
    ],
)
def test_unreadable_inputs_are_the_users_to_mend(tmp_path, write, damage):
    path = write(tmp_path / "b.json")
    write_json(path, read_json(path) | damage)
    with pytest.raises(UserError, match="no benchmark of data, storage or inference"):
        logs.ingested(tmp_path, benchmarks=[path])
    assert not (tmp_path / "tables" / "runs.parquet").exists()


@pytest.mark.parametrize("name", ["../run", "/run", "a/b", "..", "", "a\0b", 5])
def test_a_run_of_the_table_is_never_a_path(tmp_path, name):
    write_json(tmp_path / "table.json", {"experiment": "x", "runs": [{"run_id": name}]})
    with pytest.raises(UserError, match="table.json"):
        tabulate(tmp_path / "table.json", tmp_path / "results/runs", tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_ranks_of_two_attempts_never_mix_in_a_step():
    places = [(0, rank, step) for rank in range(3) for step in (0, 1)] + [
        (1, rank, 1) for rank in range(2)
    ]
    both = [{"attempt": attempt, "rank": rank, "step": step} for attempt, rank, step in places]
    started = [
        {"event": "run_start", "attempt": attempt, "world_size": 3 - attempt} for attempt in (0, 1)
    ]
    names = ("step", "attempt", "rank", "world_size", "attempt_step")
    merged = [
        tuple(r[name] for name in names) for r in merge(of_rows("steps", both), started).to_pylist()
    ]
    assert merged == [
        (0, 0, 0, 3, 0),
        (0, 0, 1, 3, 0),
        (0, 0, 2, 3, 0),
        (1, 1, 0, 2, 0),
        (1, 1, 1, 2, 0),
    ]


@pytest.mark.parametrize("attempts", [[0], [0, 1]])
def test_merged_rows_come_by_step_and_rank_and_of_a_step_twice_the_last_row_counts(attempts):
    rows = [
        {"attempt": attempt, "rank": rank, "step": step, "rows": place, "grad_norm": None}
        for attempt in attempts
        for rank in range(3)
        for place, step in enumerate([0, 1, 2, 1])
    ]
    merged = merge(of_rows("steps", rows), [])
    found = [
        [row[name] for name in ("step", "rank", "rows", "attempt")] for row in merged.to_pylist()
    ]
    assert found == [
        [step, rank, (0, 3, 2)[step], attempts[-1]] for step in range(3) for rank in range(3)
    ]
    assert merged["world_size"].to_pylist() == [3] * 9 and merged["grad_norm"].null_count == 9


@pytest.mark.parametrize("wrong", [1, 6])
def test_the_run_whose_first_loss_contradicts_its_validation_is_accused(tmp_path, wrong):
    """Losses of training in another unit: not the run that differs from most, if most are wrong."""
    runs = [logs.settings(repeat=k) for k in range(7)]
    for run in runs:
        folder = logs.write_run(tmp_path / "runs", run)
        if run.repeat < wrong:
            logs.edit(folder, lambda line: line | {"loss_sum": line["loss_sum"] / 8})
            record = logs.unsealed(folder / "run.json")
            seal_record(folder, record, {"status": "complete", "steps": run.budget.steps})
    tables = logs.ingested(tmp_path, runs)
    rows = logs.read_runs(tables).to_pylist()
    accused = {row["repeat"]: row["reasons"] for row in rows if row["validity"] != "valid"}
    assert set(accused) == set(range(wrong))
    assert all(
        "0.12" in why and "× that of the validation before it" in why for why in accused.values()
    )


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"note": "another note"}, True),
        ({"question": "Which approach ends lowest?"}, False),
        ({"target_loss": 3.0}, False),
        ({"primary": [{"quantity": "validation_loss", "margin": 0.02}]}, False),
        ({"repeats": 3}, False),
    ],
)
def test_a_run_carries_the_digest_of_the_design_that_it_began_with(tmp_path, change, kept):
    run = logs.settings()
    planned = read_json(logs.write_table(tmp_path / "planned.json", [run]))
    index = {run.identity: {DESIGNS: {"demo": digest_design(planned)}}}
    write_json(tmp_path / INDEX, index)
    folder = tmp_path / "runs" / run.identity
    assert find_designs(folder) == index[run.identity][DESIGNS]
    logs.write_run(tmp_path / "runs", run, designs=find_designs(folder))
    write_json(tmp_path / INDEX, {})
    assert find_designs(folder) == index[run.identity][DESIGNS], "of its first attempt"
    tables = logs.ingested(tmp_path, [run], **change)
    (row,) = logs.read_runs(tables).to_pylist()
    now = read_json(tables / "experiment.json")["design_sha256"]
    assert (row["design_sha256"] == now) is kept


def test_a_run_of_no_experiment_carries_no_design(tmp_path):
    assert find_designs(tmp_path / "runs/some-run") == {}
