"""Runs → a tracker, after them or beside them. A process of its own that only reads: no rank ever waits for it."""

import importlib.util
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenscale.analysis.exporters import facts
from tokenscale.analysis.exporters.measures import read
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import lock_folder

#: tracker → the module with its `Exporter`. Module and extra of pyproject.toml carry the package's name, too.
#:
#: Exporter(output, run_folder, facts)    begins anew: what an earlier export of this run left in `output` is replaced
#:   .add(points)                         steps ascending; on disk when it returns
#:   .close(facts, summary, ended)        `ended`: the run is sealed; else the export was stopped before
#: look(output)                           the command that shows it
TRACKERS = {
    "tensorboard": "tokenscale.analysis.exporters.tensorboard",
    "mlflow": "tokenscale.analysis.exporters.mlflow",
    "wandb": "tokenscale.analysis.exporters.wandb",
}


def track(
    directories: list[Path], to: str, output: Path, *, follow: bool, log: Callable[[str], None], every_s: float = 2.0
) -> None:
    """Export each run's points and facts to `output`; with `follow` until every run is sealed.

    Raises UserError where the tracker's package is missing, a folder is no run's, or a run has not ended and is not
    followed; nothing is written then.
    """
    module = _module(to)
    names = Counter(_checked(directory, follow) or str(directory.resolve()) for directory in directories)
    twice = [name for name, n in names.items() if n > 1]
    if twice:
        raise UserError("a run is named twice.", run=", ".join(twice), next="name each run once")
    with ExitStack() as stack:
        jobs = [stack.enter_context(_Job(directory, module, output, log)) for directory in directories]
        began = time.monotonic()
        while jobs := [job for job in jobs if not job.turn()]:
            time.sleep(max(every_s, 10 * (time.monotonic() - began)))  # each turn reads the whole logs
            began = time.monotonic()
    log(f"look   {module.look(output)}")


def _module(to: str) -> ModuleType:
    """The tracker's module, when its package is there."""
    if to not in TRACKERS:
        raise unknown("tracker", to, TRACKERS)
    if importlib.util.find_spec(to) is None:  # not imported yet: its module sets what it reads at its import
        raise UserError(f"the package {to} is not installed.", next=f"python -m pip install {to}")
    return importlib.import_module(TRACKERS[to])


def _checked(directory: Path, follow: bool) -> str | None:
    """The run's id; None for a run that is about to start."""
    if not (directory / "run.json").is_file():
        starting = any(directory.glob("attempt=*"))
        if follow and starting:
            return None
        raise UserError(
            "the run has not started yet." if starting else "there is no run in this folder.",
            path=directory / "run.json",
            next="--follow waits for it" if starting else "name a folder of a run: results/runs/RUN_ID",
        )
    found = facts.read(directory)
    if not follow and not facts.is_sealed(directory):
        raise UserError(
            "the run has not ended.",
            path=directory / "run.json",
            found=f"status {found.status}, not sealed" if found.status == "running" else "its seal does not match",
            next="--follow exports it while it runs, or wait for its end",
        )
    return found.run_id


class _Job:
    """One run on its way to a tracker."""

    def __init__(self, directory: Path, module: ModuleType, output: Path, log: Callable[[str], None]):
        self._directory, self._module, self._output, self._log = directory, module, output, log
        self._stack = ExitStack()
        self._locked = False
        self._exporter: Any = None
        self._summary: dict[str, float] = {}
        #: step and time of each point that has been handed on
        self._handed: list[tuple[int, float]] = []

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._exporter is not None:  # stopped before the run's end
                self._close(ended=False)
        finally:
            self._stack.close()

    def turn(self) -> bool:
        """Hand on what is new. True when the run is sealed and all of it has been handed on."""
        if not (self._directory / "run.json").is_file():
            return False
        ended = facts.is_sealed(self._directory)  # before reading: nothing is written after it
        points, self._summary = read(self._directory, ended=ended)
        marks = [(point.step, point.t_unix_s) for point in points]
        if marks[: len(self._handed)] != self._handed:
            self._log(f"anew   {self._directory.name}: a later attempt repeats steps, or logs were moved away")
            if self._exporter is not None:
                self._close(ended=False)
            self._handed = []
        if self._exporter is None:
            self._exporter = self._open()
        if new := points[len(self._handed) :]:
            self._exporter.add(new)
        self._handed = marks
        if ended:
            self._close(ended=True)
            last = f"up to step {points[-1].step}" if points else "no step"
            self._log(f"run    {self._directory.name}: {len(points)} points, {last}")
        return ended

    def _open(self):
        found = facts.read(self._directory)
        folder = self._output / found.run_id
        if (folder / "run.json").exists():
            raise UserError(
                "the output is the folder of the run itself.", output=folder, next="--output another folder"
            )
        if not self._locked:
            self._stack.enter_context(lock_folder(folder, f"the export of {found.run_id}"))
            self._locked = True
        return self._module.Exporter(self._output, folder, found)

    def _close(self, ended: bool) -> None:
        exporter, self._exporter = self._exporter, None
        exporter.close(facts.read(self._directory), self._summary, ended)
