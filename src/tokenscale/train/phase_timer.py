"""Time by phase of a step: laps by the host's clock on a CPU, by CUDA events on a GPU, without waiting."""

import time
from dataclasses import dataclass, field

import torch

#: the parts of a step, in the order of the log; bubble: waiting for the other stages of a pipeline
PARTS = ("h2d", "forward", "backward", "bubble", "exposed_communication", "optimizer")


@dataclass
class Laps:
    """Seconds of one step by phase. `step` is the whole, from the end of the step before to the end of this one."""

    seconds: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    ended_mono_s: float = 0.0


class HostTimer:
    """Timer of the phases of steps for devices that compute in the caller's thread.

    `restart` begins a step now, `lap` attributes the time since the last lap to a phase, `end` ends the step and begins
    the next one, and `read` returns the laps of the steps that have ended since the last reading.
    """

    def __init__(self) -> None:
        self._steps: list[Laps] = []
        self.restart()

    def restart(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self._laps[part] = self._laps.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        now = time.monotonic()
        self._steps.append(Laps(self._laps, now - self._began, now))
        self._began, self._last, self._laps = now, now, {}

    def read(self) -> list[Laps]:
        steps, self._steps = self._steps, []
        return steps


class CudaTimer:
    """Timer for a GPU: events are recorded in its stream and read later, so that the host runs ahead; `read` waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        self._steps: list[tuple[torch.cuda.Event, list[tuple[str, torch.cuda.Event]], torch.cuda.Event]] = []
        self.restart()

    def restart(self) -> None:
        self._began = self._record()
        self._laps: list[tuple[str, torch.cuda.Event]] = []

    def lap(self, part: str) -> None:
        self._laps.append((part, self._record()))

    def end(self) -> None:
        end = self._record()
        self._steps.append((self._began, self._laps, end))
        self._began, self._laps = end, []

    def read(self) -> list[Laps]:
        if not self._steps:
            return []
        last = self._steps[-1][2]
        last.synchronize()
        now, result = time.monotonic(), []
        for began, laps, end in self._steps:
            seconds: dict[str, float] = {}
            before = began
            for part, event in laps:
                seconds[part] = seconds.get(part, 0.0) + before.elapsed_time(event) / 1e3
                before = event
            ended = now - end.elapsed_time(last) / 1e3 if end is not last else now
            result.append(Laps(seconds, began.elapsed_time(end) / 1e3, ended))
        # an event can be recorded anew once it has been read; the last end is the beginning of the step to come
        used = {id(e): e for began, laps, end in self._steps for e in (began, end, *(event for _, event in laps))}
        used.pop(id(self._began), None)
        self._spare += used.values()
        self._steps = []
        return result

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


Timer = HostTimer | CudaTimer


def timer_of(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


class HostClock:
    """Seconds of a step in which the host neither computes nor hands work to the device: `wait_s` for its batch, and
    `own_s` for bookkeeping since the step before was handed over.
    """

    def __init__(self) -> None:
        self.wait_s = self.own_s = self._carried = self._began = self._handed = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def receive_batch(self) -> None:
        self.wait_s = self.since_begin()

    def hand_over(self) -> None:
        self.own_s = self._carried + self.since_begin() - self.wait_s

    def handed_over(self) -> None:
        self._handed = time.monotonic()

    def since_begin(self) -> float:
        return time.monotonic() - self._began

    def end(self, waited_s: float) -> None:
        """End the bookkeeping of a step; `waited_s` of it was waiting for the device."""
        self._carried = time.monotonic() - self._handed - waited_s
