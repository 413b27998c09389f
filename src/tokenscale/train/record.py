"""What a run's record says of where and how it was computed."""

import time
from pathlib import Path
from typing import Any

import torch

from tokenscale.base.files import read_json, sha256_file
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token
from tokenscale.runs.records import provenance
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train.parallel.world import World


def launched(attempt_directory: Path) -> dict[str, Any]:
    """What the launcher left for this attempt: digests of its code and inputs."""
    prepared = attempt_directory / "attempt.json"
    return read_json(prepared, "attempt's record") if prepared.is_file() else {}


def start(
    run: RunSettings, directory: Path, attempt: int, world: World, launched: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """Write the running record, from what the launcher left and what is known here."""
    hardware = {
        "device": device_name(world.device),
        "device_kind": world.device.type,
        "threads_per_rank": torch.get_num_threads(),
        "world_size": world.size,
        "nodes": list(world.nodes),
        "network": world.network,
    }
    return provenance.start(
        directory,
        {
            **launched,
            "run_id": run.identity,
            "run": to_dict(run),
            "attempt": attempt,
            **facts,
            "started_unix_s": round(time.time(), 3),
            "hardware": hardware,
        },
    )


def costs(run: RunSettings, shape: ModelSettings) -> dict[str, Any]:
    """What MFU and HFU are made of beside the device's peak: FLOPs a token by convention, and the number format. The
    peak belongs to who reads the record: a new entry in that table must not train anything again."""
    counted = {c.value: flops_per_token(shape, run.sequence_length, c, run.objective) for c in Convention}
    repeated = hardware_flops_per_token(
        shape, run.sequence_length, Convention.FULL, run.activation_checkpointing, run.objective
    )
    number = "fp8" if run.float8 else "bf16" if run.precision == "bf16-true" else run.precision
    return {"flops_per_token": counted | {"hardware": repeated}, "number_format": number}


def log_hashes(directory: Path) -> dict[str, str]:
    """Of all attempts: a resumed run's series is theirs together."""
    files = sorted(directory.glob("attempt=*/rank=*/*.jsonl"))
    return {str(f.relative_to(directory)): sha256_file(f) for f in files}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def pci_bus_id(device: torch.device) -> str | None:
    """Where NVML finds the device; None for what is no GPU."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
