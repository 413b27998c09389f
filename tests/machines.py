"""What `doctor` asks of a machine, answered by a test: what its child process and its programs print."""

from pathlib import Path

from tokenscale.cli.doctor_checks import Context

ROOT = Path(__file__).parents[1]
#: what the child process prints on a machine without GPU where all is well
TORCH = {"stage": "torch", "version": "2.13.0", "cuda": "13.0", "rocm": None, "nccl": True}
STAGES = {
    "torch": TORCH,
    "bf16 on the CPU": {"stage": "bf16 on the CPU"},
    "devices": {"stage": "devices", "devices": []},
}
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30, "capability": "9.0", "bf16": True}


def asked(results=Path("results"), *, broken=None, stages=None, ended="", **options):
    """What a check is given: all is well, except for what is said."""
    return Context(Path(results), broken or {}, STAGES if stages is None else stages, ended, **options)


def program(folder, name, text):
    """A program of that name, first in what the test puts into PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
