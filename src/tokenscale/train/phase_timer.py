"""The clock of a rank's steps: phases by the host's clock on a CPU, by CUDA events on a GPU,
without waiting.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

#: the parts of a step, in the order of the log; bubble: waiting for the other stages of a pipeline
PARTS = ("h2d", "forward", "backward", "bubble", "exposed_communication", "optimizer")


@dataclass
class Laps:
    """Seconds of one step by phase. `step` is the whole, from the end of the step before to the end
    of this one.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    ended_mono_s: float = 0.0


class HostTimer:
    """Clock for devices that compute in the caller's thread.

    `restart` begins a step now, `lap` attributes the time since the last lap to a phase, `end` ends
    the step and begins the next one, and `read` returns the laps of the steps that have ended since
    the last reading. `wait_s` is the host's last wait, and `own_s` its bookkeeping between two
    steps that it handed to the device, without waits.
    """

    def __init__(self) -> None:
        self.wait_s = self.own_s = 0.0
        self._handed = self._counted = time.monotonic()
        self._steps: list[Any] = []
        self._laps: Any
        self._began: Any
        self.restart()

    def restart(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps = {}

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self._laps[part] = self._laps.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        now = time.monotonic()
        self._steps.append(Laps(seconds=self._laps, step_s=now - self._began, ended_mono_s=now))
        self._began = now
        self._last = now
        self._laps = {}
        self._handed = now

    def read(self) -> list[Laps]:
        steps = self._steps
        self._steps = []
        return steps

    def wait_for(self, result: Callable[[], Result]) -> Result:
        """Return a result that the host has to wait for: `wait_s` seconds."""
        began = time.monotonic()
        found = result()
        self.wait_s = time.monotonic() - began
        self._handed += self.wait_s
        return found

    def hand_over(self) -> None:
        """End the bookkeeping before a step: what follows is its work."""
        self.lap("own")
        self.own_s = time.monotonic() - self._handed

    def elapsed(self) -> float:
        """Return the seconds since the last call, without pauses."""
        before = self._counted
        self._counted = time.monotonic()
        return self._counted - before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what is no part of a step, such as validation. The next step begins at the
        end.
        """
        began = time.monotonic()
        yield
        paused = time.monotonic() - began
        self._handed = self._handed + paused
        self._counted = self._counted + paused
        self.restart()


class CudaTimer(HostTimer):
    """Timer for a GPU: events are recorded in its stream and read later, so that the host runs
    ahead; `read` waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        super().__init__()

    def restart(self) -> None:
        self._began = self._record()
        self._laps = []

    def lap(self, part: str) -> None:
        self._laps.append((part, self._record()))

    def end(self) -> None:
        end = self._record()
        self._steps.append((self._began, self._laps, end))
        self._began = end
        self._laps = []
        self._handed = time.monotonic()

    def read(self) -> list[Laps]:
        if not self._steps:
            return []
        asked = time.monotonic()
        last = self._steps[-1][2]
        last.synchronize()
        now = time.monotonic()
        result = []
        self._handed += now - asked
        for began, laps, end in self._steps:
            seconds: dict[str, float] = {}
            before = began
            for part, event in laps:
                seconds[part] = seconds.get(part, 0.0) + before.elapsed_time(event) / 1e3
                before = event
            ended = now - end.elapsed_time(last) / 1e3 if end is not last else now
            result.append(
                Laps(seconds=seconds, step_s=began.elapsed_time(end) / 1e3, ended_mono_s=ended)
            )
        # an event can be recorded anew once it has been read; the last end is the beginning of the
        # step to come
        used = {
            id(e): e
            for began, laps, end in self._steps
            for e in (began, end, *(event for _, event in laps))
        }
        used.pop(id(self._began), None)
        self._spare += used.values()
        self._steps = []
        return result

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def timer_of(device: torch.device) -> HostTimer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
