"""Runs as trackers show them: the same numbers as the tables', once each, live or afterwards."""

import json
import shutil
import struct
import sys
from pathlib import Path

import pytest

from tests import logs
from tokenscale.analysis import queries, trackers
from tokenscale.analysis.measures import read_points
from tokenscale.analysis.trackers import track
from tokenscale.base.errors import UserError
from tokenscale.cli import main as cli
from tokenscale.referee import expectations
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.settings.options import to_dict

STEPS = 12
DIFF = "--- a/model.py\n+++ b/model.py\n-one\n+other\n"


def row(attempt: int, rank: int, step: int) -> dict:
    """A step that differs by attempt, rank and step in everything that ranks add up or wait for."""
    useful = 100 + 7 * step + 30 * rank + attempt
    return {
        "step": step,
        "t_unix_s": 1.7e9 + 100 * attempt + step + rank / 8,
        "t_mono_s": 10.0 + step,
        "step_s": 0.25 + 0.03 * rank + 0.01 * step + 0.001 * attempt,
        "data_wait_s": 0.05 - 0.0101 * rank + 0.002 * step + 0.0003 * attempt,
        "loss_sum": useful * (5 - 0.1 * step + 0.2 * rank),
        "useful_tokens": useful,
        "total_tokens": 256,
        "rows": 4,
        "learning_rate": 1e-3 / (1 + step),
        "grad_norm": 1.5 + step,
        "grad_norm_clipped": 1.0,
        "memory_peak_bytes": 10**8 + rank,
        "order_digest": 2**51 + step,
    }


class Ranks:
    """One attempt of a run with two ranks that can be written piece by piece."""

    def __init__(self, folder: Path, attempt: int = 0):
        self.attempt = attempt
        self.writers = [
            Writer(folder / f"attempt={attempt:02d}/rank={rank:05d}") for rank in range(2)
        ]
        for writer in self.writers:
            writer.event("run_start", world_size=2)
            writer.event("init_done", duration_s=0.5)

    def steps(self, start: int, stop: int, ranks=(0, 1)) -> None:
        for rank in ranks:
            for step in range(start, stop):
                self.writers[rank].step(**row(self.attempt, rank, step))
            self.writers[rank].flush()

    def validate(self, step: int) -> None:
        self.writers[0].event(
            "validation", step=step, loss_sum=5000.0 - 90 * step, useful_tokens=1000, rows=16
        )

    def end(self, joules: float | None = None) -> None:
        for writer in self.writers:
            writer.event("run_stop", status="complete", step=STEPS, energy_j=joules)
            writer.close()


def record(folder: Path, run, seal: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dirty.diff").write_text(DIFF)
    body = {
        "schema": 1,
        "run_id": run.identity,
        "run": to_dict(run),
        "attempt": 1,
        "started_unix_s": 1.7e9,
        "digest": "d" * 64,
        "inputs": {"store": "a" * 64, "tokenizer": "b" * 64},
        "parameters": 1234,
        "git": {"commit": "c" * 40, "dirty": True, "diff_sha256": provenance.sha256_text(DIFF)},
        "versions": {"torch": "2.13.0"},
        "hardware": logs.HARDWARE,
        "environment": {},
        "outcome": {"status": "running"},
    }
    provenance.write_json(folder / "run.json", body)
    if seal:
        provenance.seal_record(
            folder, body, {"status": "complete", "steps": STEPS, "ended_unix_s": 1.7e9 + 500}
        )


@pytest.fixture
def run():
    return logs.settings("packed", 2, steps=STEPS)


@pytest.fixture
def folder(tmp_path, run):
    """A run that was killed after step 7 and went on at step 5; its step 8 was written by one rank
    before.
    """
    folder = tmp_path / "runs" / run.identity
    first = Ranks(folder, 0)
    second = Ranks(folder, 1)
    first.validate(0)
    first.steps(0, 8)
    first.steps(8, 9, ranks=[0])
    second.steps(5, STEPS)
    second.validate(STEPS)
    second.end(joules=2.5)
    logs.retime(folder)
    record(folder, run)
    return folder


def by_step(pairs) -> dict[int, float]:
    pairs = list(pairs)
    assert len(dict(pairs)) == len(pairs), "a step twice"
    return dict(pairs)


def series(points, name) -> dict[int, float]:
    return by_step((p.step, p.values[name]) for p in points if name in p.values)


# -- what the numbers mean


def test_every_curve_is_the_one_that_sql_defines(folder, run, tmp_path, monkeypatch):
    monkeypatch.setattr(expectations, "OF_A_RUN", [])  # whatever the numbers are
    logs.ingested(tmp_path, [run])
    points, summary = read_points(folder, ended=True)
    asked = queries.connect(tmp_path / "tables")
    steps = queries.query("steps_global", asked).set_index("step")
    assert list(steps.index) == list(range(STEPS))

    def same(ours: str, theirs) -> None:
        assert series(points, ours) == pytest.approx(theirs.to_dict(), rel=1e-12), ours

    loss = queries.query("loss", asked).set_index("step")
    same("train/loss", loss["loss"])
    same("train/useful_tokens_seen", loss["useful_tokens_seen"])
    same("speed/useful_tokens_per_s", steps.useful_tokens / steps.step_s)
    same("speed/total_tokens_per_s", steps.total_tokens / steps.step_s)
    same("speed/data_wait_share", steps.data_wait_s / steps.step_s)
    raw = [name for name in steps.columns if f"step/{name}" in points[1].values]
    assert {
        "loss_sum",
        "useful_tokens",
        "step_s",
        "data_wait_s",
        "memory_peak_bytes",
        "rows",
    } <= set(raw)
    for name in raw:
        same(f"step/{name}", steps[name])
    held_out = queries.query("validation", asked).set_index("step")
    same("validation/loss", held_out["loss"])
    same("validation/perplexity", held_out["perplexity"])

    (speed,) = queries.query("throughput", asked).to_dict("records")
    (stalls,) = queries.query("stalls", asked).to_dict("records")
    for name in ("useful_tokens_per_s", "total_tokens_per_s"):
        assert summary[f"summary/{name}"] == pytest.approx(speed[name], rel=1e-12)
    assert summary["summary/data_wait_share"] == pytest.approx(
        stalls["data_stall_share"], rel=1e-12
    )
    assert summary["summary/run_stop/energy_j"] == 5.0  # of two boards


def test_a_step_that_is_not_finite_has_no_loss_and_says_so(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.writers[0].step(**row(0, 0, 0))
    ranks.writers[1].step(**row(0, 1, 0) | {"loss_sum": float("nan")})
    ranks.end()
    ((point,), _) = read_points(tmp_path, ended=True)
    assert "train/loss" not in point.values and "step/loss_sum" not in point.values
    assert point.values["step/nonfinite"] == 1 and point.values["train/grad_norm"] == 1.5
    # a log that says it beside a number
    with open(tmp_path / "attempt=00/rank=00001/steps.jsonl", "a") as file:
        file.write(json.dumps(row(0, 1, 1) | {"nonfinite": True}) + "\n")
    with open(tmp_path / "attempt=00/rank=00000/steps.jsonl", "a") as file:
        file.write(json.dumps(row(0, 0, 1)) + "\n")
    assert "train/loss" not in read_points(tmp_path, ended=True)[0][1].values


# -- beside a run that writes


def test_a_step_comes_when_every_rank_has_written_it_and_a_line_when_it_is_whole(tmp_path):
    def seen() -> list[tuple[int, bool]]:
        return [
            (point.step, "validation/loss" in point.values)
            for point in read_points(tmp_path, ended=False)[0]
        ]

    ranks = Ranks(tmp_path)
    ranks.steps(0, 3, ranks=[0])
    ranks.validate(3)
    assert seen() == []
    ranks.steps(0, 2, ranks=[1])
    assert seen() == [(0, False), (1, False)]  # the validation waits for the step before it
    path = tmp_path / "attempt=00/rank=00001/steps.jsonl"
    text = json.dumps(row(0, 1, 2)) + "\n"
    with open(path, "a") as file:
        file.write(text[:40])
    assert len(seen()) == 2
    with open(path, "a") as file:
        file.write(text[40:])
    assert seen()[2:] == [(2, False), (3, True)]


def test_broken_lines_are_left_out_and_a_field_that_a_line_lacks_is_missed_by_nobody(tmp_path):
    Ranks(tmp_path).steps(0, 2)
    path = tmp_path / "attempt=00/rank=00001/steps.jsonl"
    path.write_bytes(
        b"no json\n[1]\n" + path.read_bytes() + b"\0" * 40 + b"\n" + b'{"step": 2, "loss'
    )
    assert [point.step for point in read_points(tmp_path, ended=True)[0]] == [0, 1]
    for rank in range(2):
        line = {"step": 0, "h2d_s": 0.1 + rank, "rows": 3, "skipped": rank == 0} | (
            {"loss_sum": 1.0} if rank else {}
        )
        path.parent.with_name(f"rank={rank:05d}").joinpath("steps.jsonl").write_text(
            json.dumps(line) + "\n"
        )
    ((point,), _) = read_points(tmp_path, ended=True)
    assert point.values == {
        "step/h2d_s": 1.1,
        "step/rows": 6,
        "step/skipped": 1,
        "step/nonfinite": 0,
    }


def test_the_latest_attempt_s_validation_counts(tmp_path):
    first = Ranks(tmp_path, 0)
    second = Ranks(tmp_path, 1)
    first.validate(0)
    first.writers[0].event("validation", step=4, loss_sum=9000.0, useful_tokens=1000)
    second.writers[0].event("validation", step=4, loss_sum=8000.0, useful_tokens=1000)
    assert series(read_points(tmp_path, ended=True)[0], "validation/loss") == {0: 5.0, 4: 8.0}


def test_following_a_run_gives_what_an_export_afterwards_gives(tmp_path, run, monkeypatch):
    """The run goes on whenever the export waits."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs" / run.identity
    first = Ranks(folder, 0)

    def go_on():
        record(folder, run, seal=False)
        first.validate(0)
        first.steps(0, 8)
        yield
        assert len(tensorboard(tmp_path / "live" / run.identity)["train/loss"]) == 8
        second = Ranks(folder, 1)
        second.steps(5, STEPS)
        second.validate(STEPS)
        second.end(joules=2.5)
        record(folder, run)
        yield

    stages = go_on()
    monkeypatch.setattr(trackers.time, "sleep", lambda seconds: next(stages))
    track([folder], "tensorboard", tmp_path / "live", follow=True, log=print)
    monkeypatch.undo()
    track([folder], "tensorboard", tmp_path / "after", follow=False, log=print)
    live, after = (tensorboard(tmp_path / name / run.identity) for name in ("live", "after"))
    for found in (live, after):
        assert len(found["train/loss"]) == STEPS
        for tag in [tag for tag in found if tag.startswith("run/")]:
            found[tag] = found[tag][-1:]  # of texts, those that were true while it ran come first
    assert live == after


# -- read back with each tracker's own means: values by name and step, the last step's time, and
# facts as text


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float, object]]]:
    """tag → (step, wall time, value) by TensorBoard's own reader; texts as bytes."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.util import tensor_util

    if not folder.is_dir():
        return {}
    found = accumulators.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [
            (e.step, e.wall_time, tensor_util.make_ndarray(e.tensor_proto).ravel()[:1].tolist())
            for e in events
        ]
        for tag in found.Tags()["tensors"]
        for events in [found.Tensors(tag)]
    }


def read_tensorboard(output: Path, run_id: str):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    found = tensorboard(output / run_id)
    start = (
        EventAccumulator(str(output / run_id))
        .Reload()
        .SummaryMetadata(metadata.SESSION_START_INFO_TAG)
    )
    facts = str(metadata.parse_session_start_info_plugin_data(start.plugin_data.content).hparams)
    facts += "".join(
        events[-1][2][0].decode() for tag, events in found.items() if tag.startswith("run/")
    )
    numbers = {tag: events for tag, events in found.items() if not tag.startswith(("run/", "_"))}
    values = {
        tag: by_step((step, value[0]) for step, _, value in events)
        for tag, events in numbers.items()
    }
    return values, found["train/loss"][-1][1], facts


def read_mlflow(output: Path, run_id: str):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    # the first is deleted
    (found,) = client.search_runs([client.get_experiment_by_name("tokenscale").experiment_id])
    assert found.info.run_name == run_id and found.info.status == "FINISHED"
    histories = {
        name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics
    }
    values = {
        name: by_step((m.step, m.value) for m in history) for name, history in histories.items()
    }
    files = Path(client.download_artifacts(found.info.run_id, "", str(output)))
    assert (files / "run.json").is_file()
    last = max(m.timestamp for m in histories["train/loss"]) / 1000
    return values, last, f"{found.data} {(files / 'dirty.diff').read_text()}"


def read_wandb(output: Path, run_id: str):
    (file,) = output.glob(f"{run_id}/wandb/offline-run-*/*.wandb")
    records = wandb_records(file)
    values: dict[str, dict[int, float]] = {}
    for history in (r.history for r in records if r.WhichOneof("record_type") == "history"):
        row = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in history.item
        }
        for name, value in row.items():
            values.setdefault(name, {})[row["_step"]] = value
    facts = {
        u.key or ".".join(u.nested_key): json.loads(u.value_json)
        for r in records
        for u in (*r.run.config.update, *r.config.update, *r.summary.update)
    }
    assert {"dirty.diff", "run.json"} <= {f.path for r in records for f in r.files.files}
    values |= {name: {STEPS: value} for name, value in facts.items() if name.startswith("summary/")}
    return (
        values,
        values["_timestamp"][STEPS - 1],
        f"{facts} {(file.parent / 'files/dirty.diff').read_text()}",
    )


def wandb_records(path: Path) -> list:
    """The records of an offline run: after 7 bytes, LevelDB's log of blocks of 32 KiB with protocol
    buffers.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    place = 7
    parts = []
    found = []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        # checksum, bytes, 1 whole, 2 first, 3 more, 4 last
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return found


#: tracker → (reader, relative error of its numbers)
READERS = {
    "tensorboard": (read_tensorboard, 1e-6),
    "mlflow": (read_mlflow, 1e-12),
    "wandb": (read_wandb, 1e-12),
}


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_reads_every_value_and_fact_back(folder, run, tmp_path, monkeypatch, tracker):
    pytest.importorskip(tracker)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):  # what the exporter of W&B sets is undone
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / "out" / kind))
    for _ in range(2):  # the second time replaces the first
        assert (
            cli.main(["track", str(folder), "--to", tracker, "--output", str(tmp_path / "out")])
            == 0
        )
    read_back, error = READERS[tracker]
    values, last_unix_s, facts = read_back(tmp_path / "out", run.identity)
    points, summary = read_points(folder, ended=True)
    names = {name for point in points for name in point.values}
    assert {
        "train/loss",
        "train/learning_rate",
        "validation/loss",
        "speed/data_wait_share",
    } <= names
    expected = {name: series(points, name) for name in names} | {
        name: {STEPS: of} for name, of in summary.items()
    }
    for name, of in expected.items():
        assert values[name] == pytest.approx(of, rel=error), name
    newest = (folder / "attempt=01/rank=00001/steps.jsonl").read_text().splitlines()[-1]
    assert last_unix_s == pytest.approx(json.loads(newest)["t_unix_s"], abs=1e-3)
    rate = str(run.optimizer.learning_rate)
    for fact in (
        DIFF,
        "complete",
        rate,
        "c" * 40,
        "a" * 64,
        "b" * 64,
        "2.13.0",
        "A test CPU",
        "effective_seed",
    ):
        assert fact in facts, fact
    assert not (tmp_path / "home").exists()


# -- refusals


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_command(folder, tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(
        UserError, match=rf"{tracker} is not installed[\s\S]*python -m pip install {tracker}"
    ):
        track([folder], tracker, tmp_path / "out", follow=False, log=print)
    assert not (tmp_path / "out").exists()


def test_what_is_no_ended_run_is_refused_before_anything_is_written(folder, run, tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    unsealed = tmp_path / "unsealed"

    def refused(why: str, *folders: Path, follow=False, to=out) -> None:
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError, match=why):
            track(list(folders), "tensorboard", to, follow=follow, log=print)
        assert not out.exists() and sorted(folder.rglob("*")) == before

    refused("no run in this folder", folder, folder.parent)
    refused("no run in this folder", folder.parent, follow=True)
    refused("named twice", folder, folder)
    refused("folder of the run itself", folder, to=folder.parent)
    shutil.copytree(folder, unsealed)
    (unsealed / "run.json").unlink()
    refused("has not started yet", unsealed)
    record(unsealed, run, seal=False)
    refused(r"has not ended[\s\S]*--follow", unsealed)
    edited = (folder / "run.json").read_text().replace('"parameters": 1234', '"parameters": 1235')
    for text, why in (
        (edited, r"has not ended[\s\S]*seal does not match"),
        ("{}", "no record of a run"),
    ):
        (unsealed / "run.json").write_text(text)
        refused(why, unsealed)
    with open(folder / "attempt=01/rank=00000/steps.jsonl", "a") as file:
        file.write('{"schema":999,"step":12}\n')
    refused("newer tokenscale", folder)
