"""Watchdog of a rank: without progress it writes its stacks and exits, so that no collective hangs
until the time limit.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tokenscale.base.files import REPLACE, open_file

#: seconds between writing the stacks and exiting, in which the other ranks write theirs
LAST_S = 2.0
#: times as long that a rank may take until its first step has ended: kernels are compiled
FIRST_TIMES = 3
#: exit code of a rank that made no progress
CODE = 70


class Watchdog:
    """Write all threads' stacks to `file` and exit, `limit_s` seconds after the last `beat()`, or
    `FIRST_TIMES` as many after one of the start. 0: never.

    The stacks are written by a thread that needs no Python, so that code that never releases the
    interpreter is found.
    """

    def __init__(self, file: Path, limit_s: float):
        self.limit_s = limit_s
        self.path = file
        self._until = float("inf")
        self._dump_at = -float("inf")
        if limit_s:
            file.parent.mkdir(parents=True, exist_ok=True)
            # kept open: it must be writable when nothing else works
            descriptor = open_file(file, flags=REPLACE, follow=False)
            self._file = open(descriptor, "w", encoding="utf-8")  # noqa: SIM115
            self.beat(is_start=True)
            threading.Thread(target=self._end, name="watchdog", daemon=True).start()

    def beat(self, is_start: bool = False) -> None:
        """Report progress; called once a step."""
        if self.limit_s:
            self._patience_s = self.limit_s * (FIRST_TIMES if is_start else 1)
            dump_at = time.monotonic() + self._patience_s
            self._until = dump_at + LAST_S
            # each time starts a thread, a tenth of a millisecond
            if not 0 <= dump_at - self._dump_at <= min(1.0, self.limit_s / 4):
                self._dump_at = dump_at
                faulthandler.dump_traceback_later(self._patience_s, file=self._file)

    def close(self) -> None:
        """Stop watching. Remove an empty file."""
        if self.limit_s:
            self.limit_s = 0.0
            self._until = float("inf")
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()

    def _end(self) -> None:
        while self.limit_s:
            left = self._until - time.monotonic()
            if left <= 0:
                print(
                    f"tokenscale: no step for {self._patience_s:g} s; stacks: {self.path}",
                    file=sys.stderr,
                )
                sys.stderr.flush()
                os._exit(CODE)
            time.sleep(min(left, self.limit_s, 5.0))


#: SIGUSR1: the time limit comes (`sbatch --signal=USR1@seconds`). SIGTERM: preemption, scancel, a
#: launcher that ends. SIGHUP: a terminal that is gone.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """Training stopped after a step, with a resume state on disk. Raised on every rank."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after step {step}; the next attempt goes on from there")
        self.step = step


class Signals:
    """A context that records which signal has requested a stop, if any. Contexts may be nested.

    A second SIGINT ends the process at once, as it does everywhere; what is ignored (`nohup`) stays
    so.
    """

    def __init__(self) -> None:
        self.stop_requested: str | None = None
        self._before: list[dict[int, Any]] = []

    def __enter__(self) -> "Signals":
        main = threading.current_thread() is threading.main_thread()  # others may not set handlers
        handled = [
            number for number in SIGNALS if main and signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._before.append({number: signal.signal(number, self._note) for number in handled})
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = self.stop_requested or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.pop().items():
            signal.signal(number, handler)
