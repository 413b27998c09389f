import json
from dataclasses import replace

import pytest
import torch

from tokenscale.benchmark import gpu
from tokenscale.cli.main import main

pytestmark = [pytest.mark.experiment, pytest.mark.slow(22)]


@pytest.mark.parametrize(
    "name", ["llama-micro-b2", "gpt2-micro-fused-b1", "gpt2-micro-transformers-b2"]
)
def test_a_case_says_what_it_measured(tmp_path, name):
    record = gpu.run_case(name, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == record
    case = record["case"]
    median = sorted(record["step_s"])[1]
    assert record["tokens_per_s"] == pytest.approx(case["rows"] * 64 / median)
    assert record["mfu"] is None and "peak unknown" in gpu.format_case(record), "no guess for a CPU"
    assert record["memory_peak_bytes"] is None and record["joules_per_token"] is None
    assert (
        record["roofline_s"] is None
        and record["compile_s"] is None
        and len(record["warm_up_s"]) == 5
    )
    assert (record["parts_s"] is None) == case["peer"]


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_utilisation_is_of_the_peak_of_the_cases_own_number_format(
    tmp_path, monkeypatch, precision
):
    peaks = {"fp32": 1e12, "bf16": 15e12}
    case = replace(
        next(c for c in gpu.TOY if c.name == "llama-micro-b2"), name="one", precision=precision
    )
    monkeypatch.setattr(gpu, "TOY", [case])
    monkeypatch.setattr(gpu, "peak_flops", lambda device, number="bf16": peaks[number])
    record = gpu.run_case("one", tmp_path)
    flops = record["tokens_per_s"] * record["flops_per_token"]["full"]
    assert record["mfu"]["full"] == pytest.approx(flops / peaks[precision.removesuffix("-true")])
    assert torch.get_float32_matmul_precision() == "highest", "as a training runs"


@pytest.mark.long
def test_cases_that_are_there_are_kept_and_a_failed_one_is_told(tmp_path, capsys, monkeypatch):
    """As after a cut: what has a file is not run again; a case that dies, has no time or does not
    fit says so.
    """
    kept = {"case": {"name": "gpt2-micro-eager-b1"}, "failed": "x"}
    (tmp_path / "gpt2-micro-eager-b1.json").write_text(json.dumps(kept))
    monkeypatch.setattr(gpu, "TOY", [*gpu.TOY, gpu.Case("gpt2-broken", "gpt2-micro", 64, rows=0)])
    # in a process of its own
    found = gpu.measure(tmp_path, names=["gpt2-micro-eager", "llama-micro-eager"])
    assert (
        found["gpt2-micro-eager-b1"]["failed"] == "x"
        and found["llama-micro-eager-b1"]["tokens_per_s"] > 0
    )
    assert " tokens/s (" in capsys.readouterr().out
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    assert gpu.measure(tmp_path, names=["gpt2-broken"])["gpt2-broken"]["failed"] == "no result"
    assert capsys.readouterr().out.count("failed") == 1
    assert main(["benchmark", "gpu", "--output", str(tmp_path), "--only", "70b"]) == 2
    assert "no case matches --only" in capsys.readouterr().err
    assert gpu.measure(tmp_path / "none", names=["llama-micro-eager"], budget_s=10) == {}
    assert "left for another call" in capsys.readouterr().out
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_read_device", lambda: ("NVIDIA H100 80GB HBM3", 79 * 2**30))
    assert gpu.measure(tmp_path, names=["8b-2048-selective"]) == {}
    assert "does not fit: 111 of 79 GiB" in capsys.readouterr().out


def test_without_a_gpu_the_plan_lists_memory_and_minutes_of_every_case(capsys):
    assert main(["benchmark", "gpu", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [case.name for case in gpu.CASES]
    assert "on NVIDIA H200" in lines[0] and "does not fit" not in "".join(lines)
    minutes = float(lines[-1].split()[1])
    assert 20 <= minutes <= 40, lines[-1]


def test_the_roofline_of_the_8b_model_by_hand():
    """8,192 tokens: 6 x 7.516e9 FLOPs of products, attention 6 x 32 x 4096 x 2048 (causal), 989.4
    TFLOP/s, 4.8 TB/s.
    """
    case = next(c for c in gpu.CASES if c.name == "8b-2048-b4")
    floor = gpu.roofline(case, "NVIDIA H200")
    flops = 8192 * (6 * 7_516_459_008 + 6 * 32 * 4096 * 2048)
    assert floor["products_s"] == pytest.approx(flops / 989.4e12, rel=1e-3)
    assert floor["update_s"] == pytest.approx(16 * 8_053_329_920 / 4.8e12, rel=1e-6)
    assert (
        floor["exposed_communication_s"] == 0
        and 0 < floor["elementwise_s"] < 0.1 * floor["products_s"]
    )
    fast = gpu.roofline(replace(case, float8=True), "NVIDIA H200")
    assert 0.5 < fast["products_s"] / floor["products_s"] < 0.7
    again = gpu.roofline(replace(case, activation_checkpointing="block"), "NVIDIA H200")
    assert 1.25 < again["products_s"] / floor["products_s"] < 4 / 3
    assert gpu.roofline(case, "NVIDIA Unknown") is None
