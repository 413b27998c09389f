"""Libraries of other projects in a folder of their own, for subprocesses that read and write their
formats.

They pin older versions of NumPy and transformers than ours, so they are installed without their
dependencies (tests/peers.txt) and never into the environment of the tests, whose torch and NumPy
they use. streaming imports torchvision, of which these tests need nothing: two empty definitions
stand in for it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(__file__).with_name("peers.txt")
TORCHVISION = {
    "__init__.py": "",
    "datasets.py": "class VisionDataset:\n    pass\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "def to_tensor(image):\n    raise NotImplementedError\n",
}


def find_peers() -> Path:
    """Return the folder of the libraries: TOKENSCALE_PEERS, or one that is made once per list of
    packages.
    """
    if folder := os.environ.get("TOKENSCALE_PEERS"):
        return Path(folder)
    key = hashlib.sha256(PACKAGES.read_bytes() + sys.version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenscale-tests"
    folder = cache / f"peers-{key}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"peers-{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                install(folder)
    except OSError as error:
        pytest.skip(f"the folder of the other libraries cannot be made: {error}")
    return folder


def install(folder: Path) -> None:
    """Install the packages into a folder, or skip the test if pip cannot."""
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    options = ["--no-deps", "--retries", "1", "--timeout", "20", "--disable-pip-version-check"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(building),
        "-r",
        str(PACKAGES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        shutil.rmtree(building, ignore_errors=True)
        pytest.skip(
            "pip cannot install the other libraries: "
            f"{(done.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    building.rename(folder)


class Peers:
    """Python with the libraries, for scripts; their caches lie in a folder of the test."""

    def __init__(self, directory: Path):
        stub = directory / "stub"
        for name, text in TORCHVISION.items():
            (stub / "torchvision" / name).parent.mkdir(parents=True, exist_ok=True)
            (stub / "torchvision" / name).write_text(text)
        path = os.pathsep.join([str(stub), str(find_peers())])
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "HOME": str(directory),
            "TMPDIR": str(directory),
        }

    def run(self, script: Path, **settings: Any) -> Any:
        """Run a script with these settings as JSON; return what it printed last, from JSON."""
        command = [sys.executable, str(script), json.dumps(settings)]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])
