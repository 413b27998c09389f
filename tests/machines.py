"""What `doctor` asks of a machine, answered by a test: what its child process and its programs
print.
"""

import json
import tomllib
from pathlib import Path

from tokenscale.cli.doctor import Context

ROOT = Path(__file__).parents[1]
#: what the child process says of torch on a machine without GPU where all is well
TORCH = {"version": "2.13.0", "cuda": "13.0", "rocm": None, "nccl": True, "devices": []}
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30, "capability": "9.0"}


def asked(results=Path("results"), *, broken=None, torch=TORCH, ended=""):
    return Context(Path(results), broken or {}, torch, ended)


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def write_image_record(path, **changes):
    """The record that profiles/alps/install.py leaves when it has installed the packages."""
    alps = ROOT / "profiles/alps"
    lines = (alps / "requirements.txt").read_text().splitlines()
    record = {
        "image": tomllib.loads((alps / "train.toml").read_text())["image"],
        "digest": f"sha256:{'0' * 64}",
        "requirements": [line for line in lines if not line.startswith("#")],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | changes))
    return str(path)
