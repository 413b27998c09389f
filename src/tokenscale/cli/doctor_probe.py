"""Imports of packages and collectives of torch, tried in child processes, where a crash or a hang does no harm.

A child runs this file with `imports NAME …` or `rank`. It prints one line of JSON for each attempt at once, so that the
attempts before a crash are known.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale.cli import doctor_machine
from tokenscale.cli.packages import PACKAGES, is_importable

#: a first import from a busy network disk is slow
LIMIT_S = 60.0

#: packages that import torch: rank 1 tries them, because it has already imported torch (2 s of a core)
WITH_TORCH = ("accelerate",)

#: a collective that takes longer than this on one machine hangs
COLLECTIVE_LIMIT_S = 20.0


def try_imports() -> dict[str, str]:
    """Import the packages that need no torch in a child process. Return module → error, for installed modules that
    fail.
    """
    names = [p.module for p in PACKAGES if p.module not in ("torch", *WITH_TORCH) and is_importable(p.module)]
    lines, code = _collect_lines(_start_child("imports", *names), LIMIT_S)
    errors = {line["module"]: line["error"] for line in lines if "error" in line}
    unanswered = names[len(lines) :]
    if unanswered:
        errors[unanswered[0]] = f"importing it kills Python: {_describe_exit(code)}"
    return errors


def try_ranks() -> dict[str, Any]:
    """Run torch in two child processes that rendezvous at 127.0.0.1. `stages`: stage → its report.

    `ended`: exits of the children that failed. Without torch no child is started, and both are empty.
    """
    if not is_importable("torch"):
        return {"stages": {}, "ended": []}
    try:
        doctor_machine.check_port(socket.AF_INET, "127.0.0.1")
        first, second = _free_ports()
        meet = "1"
    except OSError:  # the ranks could not rendezvous and would wait; the other stages are still useful
        first, second, meet = 0, 0, "0"
    world = {
        "PROBE_MEET": meet,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(first),
        "PROBE_NCCL": f"tcp://127.0.0.1:{second}",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        world["GLOO_SOCKET_IFNAME"] = "lo"  # as our launcher sets it
    start = time.monotonic()
    children = [_start_child("rank", RANK=str(r), LOCAL_RANK=str(r), **world) for r in range(2)]
    answers = [_collect_lines(child, start + LIMIT_S - time.monotonic()) for child in children]
    stages: dict[str, Any] = {}
    for lines, _ in reversed(answers):  # rank 0's report counts, unless only rank 1 reports an error
        for line in lines:
            before = stages.get(line["stage"], {})
            stages[line["stage"]] = line if "error" in line or "error" not in before else before
    return {"stages": stages, "ended": [_describe_exit(code) for _, code in answers if code != 0]}


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _start_child(kind: str, *names: str, **environment: str) -> subprocess.Popen:
    """Start a child process that imports this very package, whatever its working folder holds."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "tokenscale.cli.doctor_probe", kind, *names],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )


def _collect_lines(child: subprocess.Popen, timeout_s: float) -> tuple[list[dict[str, Any]], int | None]:
    """Return the JSON lines that the child printed, and its exit code; None if it had to be killed."""
    try:
        text, code = child.communicate(timeout=max(0.0, timeout_s))[0], child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        text, code = child.communicate()[0], None
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # a package that prints while it is imported
            continue
    return [line for line in lines if isinstance(line, dict) and {"module", "stage"} & set(line)], code


def _describe_exit(code: int | None) -> str:
    if code is None:
        return f"no exit within {LIMIT_S:g} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# -- in the child


def print_facts(**facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(facts), flush=True)


def probe_imports(names: list[str]) -> None:
    """Import each module and report its outcome."""
    for name in names:
        try:
            importlib.import_module(name)
            print_facts(module=name)
        except BaseException as error:  # a package may even call exit
            print_facts(module=name, error=_describe_error(error))


def probe_rank() -> None:
    """Run as one of two ranks, with a launcher's environment.

    Both ranks try torch and gloo, then NCCL. Rank 0 tries the devices, rank 1 the packages that need torch.
    """
    me = int(os.environ["RANK"])
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:
        print_facts(stage="torch", error=_describe_error(error))
        return
    available = dist.is_available()
    print_facts(
        stage="torch",
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        gloo=available and dist.is_gloo_available(),
        nccl=available and dist.is_nccl_available(),
    )
    torch.set_num_threads(1)
    _run_stage("gloo", lambda: _sum_over_ranks("gloo", 2, "env://", torch.device("cpu")))
    if me == 0:
        _run_stage("bf16 on the CPU", lambda: _multiply(torch.device("cpu")))
        _run_stage("devices", _list_devices)
    else:
        for name in filter(is_importable, WITH_TORCH):
            _run_stage(name, partial(_import, name))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    together = min(2, devices)
    if me < together and available and dist.is_nccl_available():
        _run_stage(
            "nccl", lambda: _sum_over_ranks("nccl", together, os.environ["PROBE_NCCL"], torch.device("cuda", me))
        )


def _import(name: str) -> dict[str, Any]:
    importlib.import_module(name)
    return {}


def _run_stage(name: str, action: Callable[[], dict[str, Any]]) -> None:
    try:
        print_facts(stage=name, **action())
    except BaseException as error:
        print_facts(stage=name, error=_describe_error(error))


def _sum_over_ranks(backend: str, ranks: int, store: str, device: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if os.environ["PROBE_MEET"] == "0":
        raise ConnectionError("no connection to 127.0.0.1")
    me, cuda = int(os.environ["RANK"]), device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    start = time.perf_counter()
    dist.init_process_group(
        backend,
        init_method=store,
        rank=me,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
        device_id=device if cuda else None,
    )
    try:
        values = torch.full((1024,), float(me + 1), device=device)
        dist.all_reduce(values)
        found, wanted = set(values.tolist()), float(sum(range(1, ranks + 1)))
        seconds = time.perf_counter() - start
        rate = None
        if ranks > 1 and is_importable("xxhash"):  # of the trainer's packages, the one that this module needs
            from tokenscale.train.parallel import preflight

            buffer = preflight.new_buffer(device)
            rate = preflight.bus_bandwidth(buffer, ranks, preflight.time_all_reduce(buffer, dist.barrier)) / 1e9
    finally:
        dist.destroy_process_group()
    if found != {wanted}:
        raise ArithmeticError(f"the sum over {ranks} ranks is {sorted(found)[:3]}, not {wanted:g}")
    return {"ranks": ranks, "seconds": seconds, "gb_s": rate}


def _multiply(device: Any) -> dict[str, Any]:
    import torch

    ones = torch.ones(64, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        product = ones @ ones
    if product.dtype != torch.bfloat16 or product.float().sum().item() != 64**3:
        raise ArithmeticError("a product of ones is wrong")
    return {}


def _list_devices() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        reason = None
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()  # is_available gives no reason; this does
            except Exception as error:
                reason = _describe_error(error)
        return {"devices": [], "reason": reason}
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        device = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
        try:
            with torch.cuda.device(number):
                device["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
                _multiply(torch.device("cuda", number))
        except Exception as error:
            device["error"] = _describe_error(error)
        found.append(device)
    return {"devices": found, "reason": None}


def _describe_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        probe_rank()
    else:
        probe_imports(sys.argv[2:])
