"""The training benchmarks: equal work on all sides, figures as measured, cases that go on where they were."""

import json

import pytest

from tokenscale.base.errors import UserError
from tokenscale.benchmark import gpu, training
from tokenscale.cli.main import main

pytestmark = [pytest.mark.experiment, pytest.mark.slow(22)]


@pytest.fixture(scope="module")
def result():
    sizes = {"sequence_length": 32, "rows": 2, "vocabulary_size": 64, "steps": 2, "rounds": 2}
    return training.measure(None, models=("llama-micro", "gpt2-micro"), **sizes)


def test_every_arm_is_timed_in_each_round_in_turns(result):
    order = [(r["model"], r["round"], r["arm"]) for r in result["records"]]
    assert len(order) == len(set(order)) == 2 * 2 * 3
    first = [arm for model, number, arm in order if (model, number) == ("llama-micro", 0)]
    second = [arm for model, number, arm in order if (model, number) == ("llama-micro", 1)]
    assert second == first[1:] + first[:1]
    assert all(len(r["step_s"]) == 2 and min(r["step_s"]) > 0 for r in result["records"])


def test_the_table_says_our_part_of_each_peer_and_our_bookkeeping(result):
    text = training.format_table(result)
    assert text.count("tokenscale's part of it") == 1 and text.count("bookkeeping a step") == 2
    line = next(t for t in text.splitlines() if t.startswith("llama-micro") and training.LOOP in t)
    rounds = {}
    for record in result["records"]:
        if record["model"] == "llama-micro":
            rounds.setdefault(record["arm"], []).append(sum(record["step_s"]) / 2)
    parts = [a / b for a, b in zip(rounds[training.OURS], rounds[training.LOOP], strict=True)]
    assert f"{sum(parts) / 2:.3f} ({min(parts):.3f}-{max(parts):.3f})" in line


def test_arms_that_compute_other_losses_are_not_compared(monkeypatch):
    monkeypatch.setattr(training._PlainLoopArm, "first_loss", lambda self: 1.0)
    with pytest.raises(UserError, match="different losses"):
        training.measure(
            None, models=("llama-micro",), sequence_length=16, rows=1, vocabulary_size=64, steps=1, rounds=1
        )


@pytest.mark.parametrize("name", ["llama-micro-chunked-b2", "gpt2-micro-fused-b1", "gpt2-micro-transformers-b2"])
def test_a_case_says_what_it_measured(tmp_path, name):
    record = gpu.run_case(name, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == record
    case = record["case"]
    median = sorted(record["step_s"])[1]
    assert record["tokens_per_s"] == pytest.approx(case["rows"] * 64 / median)
    assert record["mfu"] is None and "peak unknown" in gpu.format_case(record), "no guess for a CPU"
    assert record["memory_peak_bytes"] is None and record["joules_per_token"] is None
    assert (record["parts_s"] is None) == case["peer"]


def test_cases_that_are_there_are_kept_and_a_failed_one_is_told(tmp_path, capsys, monkeypatch):
    """As after a cut: what has a file is not run again; a case that dies leaves its reason."""
    (tmp_path / "gpt2-micro-eager-b1.json").write_text(
        json.dumps({"case": {"name": "gpt2-micro-eager-b1"}, "failed": "x"})
    )
    monkeypatch.setattr(gpu, "TOY", [*gpu.TOY, gpu.Case("gpt2-broken", "gpt2-micro", 64, rows=0)])
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    found = gpu.measure(tmp_path, names=["gpt2-micro-eager", "gpt2-broken"])
    assert found["gpt2-micro-eager-b1"]["failed"] == "x" and found["gpt2-broken"]["failed"] == "no result"
    assert capsys.readouterr().out.count("failed") == 1


def test_no_case_is_begun_that_may_not_end(tmp_path, capsys):
    assert gpu.measure(tmp_path, names=["llama-micro-eager"], budget_s=10) == {}
    assert "left for another call" in capsys.readouterr().out


def test_a_name_that_no_case_has_is_told(tmp_path, capsys):
    assert main(["benchmark", "gpu", "--output", str(tmp_path), "--only", "70b"]) == 2
    assert "no case matches --only" in capsys.readouterr().err


def test_ladders_change_one_thing_at_a_time():
    """Eager, compiled, fused, in chunks: each differs from the one before in one setting."""
    for start in range(0, len(gpu.CASES), 1):
        steps = gpu.CASES[start : start + 4]
        if not steps[0].name.endswith(tuple(f"eager-b{c.rows}" for c in gpu.CASES)):
            continue
        for one, other in zip(steps[:-1], steps[1:], strict=True):
            changed = [
                k
                for k in ("model", "rows", "compile", "fused", "loss_chunk", "peer")
                if getattr(one, k) != getattr(other, k)
            ]
            assert len(changed) == 1
