"""Snakemake in a fork of a process that has imported it already: two thirds of a dry run's time are
imports.
"""

import atexit
import os
import sys
import tempfile
from pathlib import Path

from tests import served
from tests.forks import context


class Started:
    """A `python -m snakemake` in a folder, on its way, with a process group of its own."""

    def __init__(self, arguments: list[str], root: Path, environment: dict[str, str]):
        self._output = tempfile.NamedTemporaryFile(  # noqa: SIM115  # until the process ends
            mode="r", errors="replace"
        )
        asked = (arguments, str(root), environment, self._output.name, served.python())
        self._process = context.Process(target=_main, args=asked)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process's number, which is that of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def wait(self, timeout_s: float = 400) -> tuple[int, str]:
        """Its end: (exit code, stdout and stderr together). Raises TimeoutError, and ends it."""
        self._process.join(timeout_s)
        with self._output:
            if self._process.is_alive():
                self._process.kill()
                raise TimeoutError(self._output.read())
            return self._process.exitcode, self._output.read()


def snakemake(
    arguments: list[str], root: Path, environment: dict[str, str], timeout_s: float = 400
) -> tuple[int, str]:
    """What `python -m snakemake` does in a folder: (exit code, stdout and stderr together)."""
    return Started(arguments, root, environment).wait(timeout_s)


def _main(
    arguments: list[str], root: str, environment: dict[str, str], output: str, python: str
) -> None:
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["snakemake", *arguments]
    sys.executable = python  # its jobs' Python, too (runs/launch/lock.py)
    from snakemake.cli import main

    atexit._clear()  # what the process that forked has registered
    try:
        main(sys.argv[1:])
    finally:
        atexit._run_exitfuncs()
