"""What `doctor` says of GPUs, bf16 and sums over ranks. No GPU is needed: driver and torch are told what to say."""

import json
from pathlib import Path

import pytest

from tests.machines import GPU, STAGES, TORCH, asked, program
from tokenscale.cli import doctor_python

DRIVER = {"names": ["NVIDIA H200"], "version": "570.1", "text": ""}
NO_DRIVER = {"names": [], "version": "", "text": "no GPU driver found (nvidia-smi)"}


@pytest.mark.parametrize(
    "driver, torch, devices, hidden, verdict, words",
    [
        (NO_DRIVER, {}, {"devices": []}, None, "no", "training runs on the CPU"),
        (DRIVER, {}, {"devices": [GPU]}, None, "ok", "1 x NVIDIA H200 (150 GiB, capability 9.0); torch for CUDA 13.0"),
        (
            DRIVER,
            {"cuda": None, "version": "2.13.0+cpu"},
            {"devices": []},
            None,
            "no",
            "2.13.0+cpu is a build for CPUs",
        ),
        (DRIVER, {}, {"devices": []}, "", "no", "CUDA_VISIBLE_DEVICES='' hides them"),
        (DRIVER, {}, {"error": "RuntimeError: driver is too old"}, None, "no", "driver is too old"),
        (DRIVER, {}, {"devices": [GPU | {"error": "no kernel image"}]}, None, "no", "GPU 0: no kernel image"),
        (
            DRIVER | {"names": ["NVIDIA H200"] * 4},
            {},
            {"devices": [GPU]},
            "2",
            "note",
            "the driver sees 4 (NVIDIA H200); CUDA_VISIBLE_DEVICES is 2",
        ),
        (NO_DRIVER, {"cuda": None, "rocm": "7.1"}, {"devices": [GPU] * 2}, None, "ok", "2 x NVIDIA H200"),
    ],
)
def test_gpus_of_driver_and_torch_are_compared(monkeypatch, driver, torch, devices, hidden, verdict, words):
    monkeypatch.setattr(doctor_python, "query_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor_python.check_gpus(
        asked(stages=STAGES | {"torch": TORCH | torch, "devices": {"stage": "devices"} | devices})
    )
    assert found.verdict == verdict and words in found.fact, found


def test_the_driver_is_asked_through_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_python.query_driver()["names"] == []
    program(tmp_path, "nvidia-smi", "echo '570.86, NVIDIA H200'; echo '570.86, NVIDIA H200'")
    assert doctor_python.query_driver() == {"names": ["NVIDIA H200"] * 2, "version": "570.86", "text": ""}
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9")
    found = doctor_python.query_driver()
    assert found["names"] == [] and "could not talk to the driver" in found["text"]


@pytest.mark.parametrize(
    "devices, flags, verdict, native",
    [
        ([GPU], set(), "ok", True),
        ([GPU, GPU | {"name": "Tesla T4", "bf16": False}], set(), "note", False),
        ([], {"avx512_bf16"}, "ok", True),
        ([], {"avx2"}, "note", False),
    ],
)
def test_bf16_is_native_or_slow(monkeypatch, devices, flags, verdict, native):
    monkeypatch.setattr(doctor_python, "read_cpu_flags", lambda: flags)
    found = doctor_python.check_bf16(asked(stages=STAGES | {"devices": {"stage": "devices", "devices": devices}}))
    assert (found.verdict, found.values["native"]) == (verdict, native)


@pytest.fixture
def sweep(monkeypatch):
    """Set what `benchmark collectives` prints and writes; return the arguments of its calls."""
    calls = []

    def result(code, text, seconds=None):
        def run(*arguments):
            calls.append(arguments)
            if seconds is not None:
                size = int(arguments[arguments.index("--sizes") + 2])
                record = {"bytes": size, "seconds": seconds * size / 2**20}
                Path(arguments[-1]).write_text(json.dumps({"records": [{"bytes": 4096, "seconds": 1.0}, record]}))
            return code, text

        monkeypatch.setattr(doctor_python, "run_python", run)
        return calls

    return result


@pytest.mark.parametrize(
    "code, text, words",
    [
        (1, "Traceback:\ntorch.distributed.DistNetworkError: refused\n  at\ntokenscale: a rank failed.", "refused"),
        (2, "tokenscale: a rank of the sweep failed.\n  code  -11", "a rank of the sweep failed."),
        (None, "no output within 60 s", "no output within 60 s"),
        (-9, "", "signal 9"),
    ],
)
def test_an_all_reduce_that_fails_or_hangs_is_no(sweep, code, text, words):
    sweep(code, text)
    found = doctor_python.check_gloo(asked())
    assert found.verdict == "no" and words in found.fact and "ip link set lo up" in found.next


def test_what_cannot_be_tried_is_told_apart(sweep):
    calls = sweep(0, "", 1.0)
    assert doctor_python.check_gloo(asked(stages={})).fact == "unknown without torch"
    crashed = {"torch": TORCH}
    assert "ended early: signal 11" in doctor_python.check_bf16(asked(stages=crashed, ended="signal 11")).fact
    no_nccl = STAGES | {"torch": TORCH | {"nccl": False}}
    assert "not in this build" in doctor_python.check_nccl(asked(stages=no_nccl)).fact
    assert "sees no GPU" in doctor_python.check_nccl(asked()).fact
    one = STAGES | {"devices": {"devices": [GPU]}}
    assert doctor_python.check_nccl(asked(stages=one)).verdict == "ok" and calls == []


def test_the_speed_of_an_all_reduce_is_compared_with_the_machines_file(sweep):
    two = STAGES | {"devices": {"devices": [GPU, GPU]}}
    calls = sweep(0, "", 2**20 / 40e9)
    found = doctor_python.check_nccl(asked(stages=two, least_node_gb_s=39.0))
    assert found.verdict == "ok" and found.fact.endswith("an all-reduce, at 40 GB/s") and "auto" in calls[0]
    slow = doctor_python.check_nccl(asked(stages=two, least_node_gb_s=60.0))
    assert slow.verdict == "note" and "expects at least 60 GB/s (least_node_gb_s)" in slow.fact
    gloo = doctor_python.check_gloo(asked(least_node_gb_s=60.0))
    assert gloo.verdict == "ok" and gloo.values["gb_s"] == pytest.approx(40) and "cpu" in calls[-1]
