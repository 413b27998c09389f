"""What several workers or suites need and none changes: made by the first that asks, under a
lock.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of the whole session, or of all suites of `.ci/run`, which `make` fills once. Nobody
    may change it.
    """
    base = temporary.getbasetemp()
    base = Path(
        os.environ.get("MADE_ONCE")
        or (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    )
    folder = base / name
    made = base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
