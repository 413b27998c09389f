"""Checks of what every process inherits: environment variables, encodings, the clock."""

import os
import re
import sys
import time

from tokenscale.base.errors import without_password
from tokenscale.cli.doctor_finding import Asked, Finding
from tokenscale.runs.records.provenance import SECRET


def environment(asked: Asked) -> Finding:
    """Variables of the environment that change what processes do."""
    ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    names = "CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|MASTER_(ADDR|PORT)|PYTHON(PATH|OPTIMIZE)"
    families = rf"(NCCL|GLOO|FI|TORCH|PYTORCH|HF)_(?!.*({SECRET.pattern}))\w+"
    others = {n: value for n, value in sorted(os.environ.items()) if re.fullmatch(f"{names}|{families}", n)}
    values = {"variables": {name: without_password(value) for name, value in (ranks | others).items()}}
    fact = ", ".join(f"{n}={value}" for n, value in values["variables"].items()) or "nothing that changes training"
    if {"RANK", "WORLD_SIZE"} <= ranks.keys():  # what `train` knows torchrun by; our own launcher takes them away
        hint = "unset RANK WORLD_SIZE: `train` takes itself for a rank of torchrun's; runs of the workflow do not"
        return Finding("note", fact, hint, values)
    if "PYTHONOPTIMIZE" in others:
        return Finding("note", fact, "unset PYTHONOPTIMIZE: tests without assert prove nothing", values)
    return Finding("ok", fact, values=values)


def locale(asked: Asked) -> Finding:
    """Encodings of files and of the terminal."""
    names = sys.getfilesystemencoding(), getattr(sys.stdout, "encoding", None) or "unknown"
    fact = f"file names in {names[0]}, output in {names[1]}"
    values = {"file_names": names[0], "output": names[1]}
    if all(name.lower().replace("-", "") == "utf8" for name in names):
        return Finding("ok", fact, values=values)
    return Finding("note", fact, "export PYTHONUTF8=1: texts of this project are UTF-8", values)


def clock(asked: Asked) -> Finding:
    """The clock that steps are timed with, and the one that dates files."""
    info = time.get_clock_info("perf_counter")
    ticks = [time.perf_counter() for _ in range(1000)]
    back = any(later < earlier for earlier, later in zip(ticks, ticks[1:], strict=False))
    values = {"resolution_s": info.resolution, "monotonic": info.monotonic and not back}
    if back or not info.monotonic:
        return Finding("no", "the clock that times steps runs backwards", "trust no timing of this machine", values)
    fact = f"monotonic, resolution {info.resolution:.0e} s"
    if info.resolution > 1e-4:
        return Finding("note", f"{fact}: too coarse for short steps", "measure longer steps", values)
    if (year := time.gmtime().tm_year) < 2025:
        fact += f"; the date says {year}, and certificates and times of files depend on it"
        return Finding("note", fact, "set the date", values)
    return Finding("ok", fact, values=values)
