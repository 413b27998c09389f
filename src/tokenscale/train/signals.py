"""Interruption: a signal becomes a checkpoint between two steps, on all ranks after the same step."""

import signal
import threading
from types import FrameType
from typing import Any

#: SIGUSR1: the time limit comes (`sbatch --signal=USR1@seconds`). SIGTERM: preemption, scancel, a launcher that ends.
#: SIGHUP: a terminal that is gone.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """Training stopped after a step, with a resume state on disk. Raised on every rank."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after step {step}; the next attempt goes on from there")
        self.step = step


class Signals:
    """A context that records which signal has requested a stop, if any. Contexts may be nested.

    A second SIGINT ends the process at once, as it does everywhere; what is ignored (`nohup`) stays so.
    """

    def __init__(self) -> None:
        self.stop_requested: str | None = None
        self._before: list[dict[int, Any]] = []

    def __enter__(self) -> "Signals":
        main = threading.current_thread() is threading.main_thread()  # others may not set handlers
        handled = [number for number in SIGNALS if main and signal.getsignal(number) is not signal.SIG_IGN]
        self._before.append({number: signal.signal(number, self._note) for number in handled})
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = self.stop_requested or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.pop().items():
            signal.signal(number, handler)
