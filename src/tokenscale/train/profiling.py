"""Traces by torch.profiler, and garbage collection at fixed steps."""

import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tokenscale.settings.run import ProfileSettings


class Trace:
    """Record steps `first` to `first + steps` of this rank into `<folder>/trace.json.gz`, for Perfetto or Chrome."""

    def __init__(self, settings: ProfileSettings, folder: Path, device: torch.device):
        self._first, self._after = settings.first, settings.first + settings.steps
        self._path = folder / "trace.json.gz"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the trace if step `step` is the first to record."""
        if step == self._first and self._after > self._first:
            self._profile = profile(activities=self._activities, record_shapes=True, profile_memory=True)
            self._profile.start()

    def after(self, done: int) -> None:
        """Write the trace if `done` steps end the recording."""
        if self._profile is not None:
            self._profile.step()
            if done >= self._after:
                self.close()

    def close(self) -> None:
        """Write an unfinished trace."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None


class Garbage:
    """Collect garbage every `every` steps on all ranks together, not in between: a pause of one rank is one of all."""

    def __init__(self, every: int):
        self._every, self._was = every, gc.isenabled()
        if every:
            gc.collect()
            gc.freeze()  # what is there now stays: no collection looks at it again
            gc.disable()

    def after(self, done: int) -> None:
        """Collect garbage if it is due after `done` steps."""
        if self._every and done % self._every == 0:
            gc.collect(1)

    def close(self) -> None:
        """Restore automatic collection."""
        if self._every:
            gc.unfreeze()
            if self._was:
                gc.enable()
