"""What `doctor` says of GPUs, bf16 and sums over ranks. No GPU is needed: driver and torch are told what to say."""

from dataclasses import replace

import pytest

from tests.machines import GPU, STAGES, TORCH, asked, program
from tokenscale.cli import doctor_checks
from tokenscale.cli import doctor_machine as machine

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
        (DRIVER, {}, {"devices": [], "reason": "driver is too old"}, None, "no", "driver is too old"),
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
    monkeypatch.setattr(doctor_checks, "query_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor_checks.check_gpus(
        asked(stages=STAGES | {"torch": TORCH | torch, "devices": {"stage": "devices"} | devices})
    )
    assert found.verdict == verdict and words in found.fact, found


def test_the_driver_is_asked_through_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_checks.query_driver()["names"] == []
    program(tmp_path, "nvidia-smi", "echo '570.86, NVIDIA H200'; echo '570.86, NVIDIA H200'")
    assert doctor_checks.query_driver() == {"names": ["NVIDIA H200"] * 2, "version": "570.86", "text": ""}
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9")
    found = doctor_checks.query_driver()
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
    monkeypatch.setattr(machine, "read_cpu_flags", lambda: flags)
    found = doctor_checks.check_bf16(asked(stages=STAGES | {"devices": {"stage": "devices", "devices": devices}}))
    assert (found.verdict, found.values["native"]) == (verdict, native)


@pytest.mark.parametrize(
    "stages, words",
    [
        ({"gloo": {"stage": "gloo", "error": "RuntimeError: Connection refused"}}, "Connection refused"),
        ({"gloo": None}, "ended early: signal 11"),
        ({"torch": None}, "unknown without torch"),
    ],
)
def test_a_sum_that_fails_crashes_or_cannot_be_tried_is_told_apart(stages, words):
    said = {name: stage for name, stage in (STAGES | stages).items() if stage}
    found = doctor_checks.check_gloo(asked(stages=said, ended=["signal 11"]))
    assert found.verdict == "no" and words in found.fact


def test_nccl_needs_a_build_with_it_and_a_gpu():
    assert (
        "not in this build" in doctor_checks.check_nccl(asked(stages=STAGES | {"torch": TORCH | {"nccl": False}})).fact
    )
    assert "sees no GPU" in doctor_checks.check_nccl(asked()).fact
    two = STAGES | {"devices": {"stage": "devices", "devices": [GPU, GPU]}}
    measured = asked(stages=two | {"nccl": {"ranks": 2, "seconds": 1.0, "gb_s": 40.0}})
    found = doctor_checks.check_nccl(measured)
    assert found.verdict == "ok" and found.fact.endswith("in 1.00 s, at 40 GB/s once connected")
    assert doctor_checks.check_nccl(replace(measured, least_node_gb_s=39.0)).verdict == "ok"
    slow = doctor_checks.check_nccl(replace(measured, least_node_gb_s=60.0))
    assert slow.verdict == "note" and "expects at least 60 GB/s (least_node_gb_s)" in slow.fact
    failed = doctor_checks.check_nccl(asked(stages=two | {"nccl": {"error": "DistBackendError: no transport"}}))
    assert failed.verdict == "no" and "no transport" in failed.fact and "NCCL_DEBUG" in failed.next
