"""The run's record: where and how it was computed."""

import time
from pathlib import Path
from typing import Any

import torch

import tokenscale
from tokenscale.base.files import read_json, sha256_file
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token
from tokenscale.runs.records import provenance
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train.parallel.world import World


def launched(attempt_directory: Path) -> dict[str, Any]:
    """Return the facts that the launcher wrote for this attempt: digests of its code and inputs."""
    prepared = attempt_directory / "attempt.json"
    return read_json(prepared, "attempt's record") if prepared.is_file() else {}


def start(
    run: RunSettings, directory: Path, attempt: int, world: World, launched: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """Write the running record, from the launcher's facts and those known here."""
    hardware = {
        "device": device_name(world.device),
        "device_kind": world.device.type,
        "threads_per_rank": torch.get_num_threads(),
        "world_size": world.size,
        "nodes": list(world.nodes),
        "network": world.network,
        "links_gb_s": world.links,
    }
    return provenance.start_record(
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
    """Return FLOPs per token by convention and the number format. The device's peak is looked up when the record is
    read.
    """
    counted = {c.value: flops_per_token(shape, run.sequence_length, c, run.objective) for c in Convention}
    repeated = hardware_flops_per_token(
        shape, run.sequence_length, Convention.FULL, run.activation_checkpointing, run.objective
    )
    return {"flops_per_token": counted | {"hardware": repeated}, "number_format": run.number_format}


def log_hashes(directory: Path) -> dict[str, str]:
    """Return the hashes of the logs of all attempts: a resumed run's series is theirs together."""
    files = sorted(directory.glob("attempt=*/rank=*/*.jsonl"))
    return {str(f.relative_to(directory)): sha256_file(f) for f in files}


def changed_code(record: dict[str, Any]) -> list[str]:
    """Return the source files whose content is no longer the one that the launcher recorded for this run."""
    package = Path(tokenscale.__file__).parent
    files = {name: package / name for name in record.get("code", {})}
    return sorted(
        name for name, path in files.items() if not path.is_file() or sha256_file(path) != record["code"][name]
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def pci_bus_id(device: torch.device) -> str | None:
    """Return the PCI address by which NVML finds the device; None for a device that is no GPU."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)  # its type leaves the address out
    return f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
