"""The training benchmarks: equal work on all sides, figures as measured, cases that go on where they were."""

import json
from dataclasses import asdict, replace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.benchmark import gpu, training
from tokenscale.cli.main import main
from tokenscale.costs.peaks import MEMORY_TB_S, PEAKS

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


@pytest.mark.parametrize("name", ["llama-micro-b2", "gpt2-micro-fused-b1", "gpt2-micro-transformers-b2"])
def test_a_case_says_what_it_measured(tmp_path, name):
    record = gpu.run_case(name, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == record
    case = record["case"]
    median = sorted(record["step_s"])[1]
    assert record["tokens_per_s"] == pytest.approx(case["rows"] * 64 / median)
    assert record["mfu"] is None and "peak unknown" in gpu.format_case(record), "no guess for a CPU"
    assert record["memory_peak_bytes"] is None and record["joules_per_token"] is None
    assert record["roofline_s"] is None and record["compile_s"] is None and len(record["warm_up_s"]) == 5
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


def test_a_case_in_a_process_of_its_own_leaves_its_result(tmp_path, capsys):
    """As on a GPU: the parent reads the file, and the process must end without an error."""
    found = gpu.measure(tmp_path, names=["llama-micro-eager"])
    assert "failed" not in found["llama-micro-eager-b1"], found
    assert found["llama-micro-eager-b1"]["tokens_per_s"] > 0
    assert " tokens/s (" in capsys.readouterr().out


@pytest.mark.parametrize("name, model, rows", [("8b-2048", "llama-8b-nemo", 1), ("gpt2-124m", "gpt2-124m", 16)])
def test_ladders_change_one_thing_at_a_time(name, model, rows):
    ladder = [
        c
        for c in gpu.CASES
        if c.name in [f"{name}-{kind}-b{rows}" for kind in ("eager", "compiled", "fused", "chunked")]
    ]
    assert len(ladder) == 4 and {c.model for c in ladder} == {model}
    for one, other in zip(ladder[:-1], ladder[1:], strict=True):
        assert sum(asdict(one)[key] != value for key, value in asdict(other).items() if key != "name") == 1


def test_names_are_unique_and_cases_with_a_target_come_with_their_peer():
    names = [case.name for case in gpu.CASES]
    assert len(set(names)) == len(names)
    shapes = {(c.model, c.sequence_length) for c in gpu.CASES if c.peer}
    assert {(c.model, c.sequence_length) for c in gpu.CASES if c.target} <= shapes
    assert gpu.CASES[0].target and gpu.CASES[1].peer


def test_without_a_gpu_the_plan_lists_memory_and_minutes_of_every_case(capsys):
    assert main(["benchmark", "gpu", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [case.name for case in gpu.CASES]
    assert "on NVIDIA H200" in lines[0] and "does not fit" not in "".join(lines)
    minutes = float(lines[-1].split()[1])
    assert 20 <= minutes <= 40, lines[-1]


def test_a_case_that_cannot_fit_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_read_device", lambda: ("NVIDIA H100 80GB HBM3", 79 * 2**30))
    assert gpu.measure(tmp_path, names=["8b-2048-selective"]) == {}
    assert "does not fit: 111 of 79 GiB" in capsys.readouterr().out


def test_the_roofline_of_the_8b_model_by_hand():
    """8,192 tokens: 6 x 7.516e9 FLOPs of products, attention 6 x 32 x 4096 x 2048 (causal), 989.4 TFLOP/s, 4.8 TB/s."""
    case = next(c for c in gpu.CASES if c.name == "8b-2048-b4")
    floor = gpu.roofline(case, "NVIDIA H200")
    flops = 8192 * (6 * 7_516_459_008 + 6 * 32 * 4096 * 2048)
    assert floor["products_s"] == pytest.approx(flops / 989.4e12, rel=1e-3)
    assert floor["update_s"] == pytest.approx(16 * 8_053_329_920 / 4.8e12, rel=1e-6)
    assert floor["exposed_communication_s"] == 0 and 0 < floor["elementwise_s"] < 0.1 * floor["products_s"]
    fast = gpu.roofline(replace(case, float8=True), "NVIDIA H200")
    assert 0.5 < fast["products_s"] / floor["products_s"] < 0.7
    again = gpu.roofline(replace(case, activation_checkpointing="block"), "NVIDIA H200")
    assert 1.25 < again["products_s"] / floor["products_s"] < 4 / 3
    assert gpu.roofline(case, "NVIDIA Unknown") is None


def test_every_device_with_a_peak_has_a_bandwidth():
    assert {name for peak in PEAKS for name in peak.names} == set(MEMORY_TB_S)
