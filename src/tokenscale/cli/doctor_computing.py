"""Checks of what torch computes on: GPUs, bf16, and sums over ranks. What torch says, `probe` has asked in children."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from tokenscale.cli import doctor_machine as machine
from tokenscale.cli.doctor_finding import GIB, Asked, Finding, stage_of
from tokenscale.cli.doctor_machine import output_of
from tokenscale.runs.records import control_groups


def gpu(asked: Asked) -> Finding:
    """GPUs as torch sees them, and as the driver does."""
    driver = driver_gpus()
    there = len(driver["names"])
    seen = f"the driver sees {there} ({', '.join(dict.fromkeys(driver['names']))})" if there else driver["text"]
    stage, problem = stage_of(asked, "devices")
    if problem:
        return Finding("no", f"{seen}; what torch sees is {problem.fact}", problem.next, {"driver": driver})
    torch, devices = asked.ranks.result()["stages"]["torch"], stage.get("devices", [])
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else None
    values = {"devices": devices, "driver": driver}
    if devices:
        names = [f"{d['name']} ({d['memory_bytes'] / GIB:.0f} GiB, capability {d['capability']})" for d in devices]
        fact = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) + f"; torch for {build}"
        fact += f", driver {driver['version']}" if driver["version"] else ""
        if failing := [f"GPU {n}: {d['error']}" for n, d in enumerate(devices) if "error" in d]:
            return Finding("no", f"{fact}; {'; '.join(failing)}", "install a torch that is built for this GPU", values)
        if there > len(devices):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            return Finding("note", f"{fact}; {seen}; CUDA_VISIBLE_DEVICES is {visible}", values=values)
        return Finding("ok", fact, values=values)
    if not there:
        return Finding("no", f"none: {seen}; training runs on the CPU", values=values)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build is None:
        why, cure = f"torch {torch['version']} is a build for CPUs", "make setup without PIP_ARGS: a build for CUDA"
    elif hidden is not None:
        why, cure = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch for {build} cannot use them: {stage.get('reason') or stage.get('error') or 'it does not say why'}"
        cure = "renew the driver, or install a torch for an older CUDA"
    return Finding("no", f"{seen}, but {why}; training runs on the CPU", cure, values)


def driver_gpus() -> dict[str, Any]:
    """GPUs that NVIDIA's driver names, its version, and in words where there are none."""
    if shutil.which("nvidia-smi"):
        code, text = output_of(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
        if code == 0 and text:
            rows = [line.split(", ", 1) for line in text.splitlines() if ", " in line]
            return {"names": [row[1] for row in rows], "version": rows[0][0] if rows else "", "text": ""}
        first = text.splitlines()[0] if text else "it names no GPU"
        return {"names": [], "version": "", "text": f"nvidia-smi is here, but: {first}"}
    version = re.search(r"\d+\.\d+(\.\d+)?", control_groups.text_of(Path("/proc/driver/nvidia/version")))
    if version:
        return {"names": [], "version": version[0], "text": f"driver {version[0]}, but nvidia-smi is not found"}
    return {"names": [], "version": "", "text": "no driver of a GPU is found (nvidia-smi)"}


def bf16(asked: Asked) -> Finding:
    """Whether the device that training would use computes in bf16 by itself."""
    stage, problem = stage_of(asked, "bf16 on the CPU")
    if problem:
        return problem
    devices = asked.ranks.result()["stages"].get("devices", {}).get("devices", [])
    if without := [d["name"] for d in devices if not d.get("bf16")]:
        return Finding("note", f"{without[0]} has no bf16 units: slow", "use precision: fp32", {"native": False})
    if devices:
        return Finding("ok", "on the GPU", values={"native": True})
    if "error" in stage:
        return Finding("no", f"does not work on the CPU: {stage['error']}", "use precision: fp32")
    units = sorted(machine.cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    if units:
        return Finding("ok", f"on the CPU, which has {', '.join(units)}", values={"native": True})
    fact = "works on the CPU, which has no instructions for it: slow"
    return Finding("note", fact, "use precision: fp32", {"native": False})


def gloo(asked: Asked) -> Finding:
    """A sum over two processes on the loopback interface, as ranks on CPUs make it."""
    return _collective(asked, "gloo", "set up the loopback interface; see loopback")


def nccl(asked: Asked) -> Finding:
    """A sum on the first GPU, or over the first two."""
    stage, problem = stage_of(asked, "torch")
    if problem:
        return problem
    if not stage["nccl"]:
        return Finding("no", f"not in this build of torch ({stage['version']}); needed only for GPUs")
    if not asked.ranks.result()["stages"].get("devices", {}).get("devices"):
        return Finding("no", "in this build of torch, but torch sees no GPU")
    return _collective(
        asked, "nccl", "NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 often helps where GPUs cannot reach each other"
    )


def _collective(asked: Asked, backend: str, cure: str) -> Finding:
    stage, problem = stage_of(asked, backend)
    if problem:
        return problem
    if "error" in stage:
        return Finding("no", f"a sum over ranks fails: {stage['error']}", cure)
    ranks = "1 rank" if stage["ranks"] == 1 else f"{stage['ranks']} ranks"
    return Finding("ok", f"{ranks} met and summed in {stage['seconds']:.2f} s", values=stage)
