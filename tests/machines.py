"""What `doctor` asks of a machine, answered by a test: what its ranks say, what its programs print."""

from concurrent.futures import Future
from pathlib import Path

from tokenscale.cli.doctor_checks import DoctorContext

ROOT = Path(__file__).parents[1]
#: what the ranks say on a machine without GPU where all is well
TORCH = {"stage": "torch", "version": "2.13.0", "cuda": "13.0", "rocm": None, "gloo": True, "nccl": True}
STAGES = {
    "torch": TORCH,
    "gloo": {"stage": "gloo", "ranks": 2, "seconds": 0.1},
    "bf16 on the CPU": {"stage": "bf16 on the CPU"},
    "devices": {"stage": "devices", "devices": [], "reason": None},
    "accelerate": {"stage": "accelerate"},
}
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30, "capability": "9.0", "bf16": True}


def ready(value):
    future = Future()
    future.set_result(value)
    return future


def asked(results=Path("results"), *, network=False, imports=None, stages=None, ended=()):
    """What a check is given: all is well, except for what is said."""
    ranks = {"stages": STAGES if stages is None else stages, "ended": list(ended)}
    return DoctorContext(Path(results), network, ready(imports or {}), ready(ranks))


def program(folder, name, text):
    """A program of that name, first in what the test puts into PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
