"""Snakemake in a fork of a process that has imported it already: two thirds of a dry run's time are imports."""

import os
import sys
import tempfile
from pathlib import Path

from tests import served
from tests.forks import context


def snakemake(arguments: list[str], root: Path, environment: dict[str, str], timeout_s: float = 400) -> tuple[int, str]:
    """What `python -m snakemake` does in a folder: (exit code, stdout and stderr together)."""
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as output:
        process = context.Process(target=_main, args=(arguments, str(root), environment, output.name, served.python()))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            raise TimeoutError(output.read())
        return process.exitcode, output.read()


def _main(arguments: list[str], root: str, environment: dict[str, str], output: str, python: str) -> None:
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["snakemake", *arguments]
    sys.executable = python  # its jobs' Python, too (launch/path.py)
    from snakemake.cli import main

    main(arguments)
