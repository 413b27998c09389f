"""Watchdog of a rank: without progress it writes its stacks and exits, so that no collective hangs until the time
limit.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

#: seconds between writing the stacks and exiting, in which the other ranks write theirs
LAST_S = 2.0
#: exit code of a rank that made no progress
CODE = 70


class Watchdog:
    """Write all threads' stacks to `file` and exit, `limit_s` seconds after the last `beat()`. 0: never.

    The stacks are written by a thread that needs no Python, so that code that never releases the interpreter is found.
    """

    def __init__(self, file: Path, limit_s: float):
        self.limit_s, self.path = limit_s, file
        self._until, self._armed = float("inf"), -float("inf")
        if limit_s:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(file, "w", encoding="utf-8")  # kept open: it must be writable when nothing else works
            self.beat()
            threading.Thread(target=self._end, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Report progress; called once a step."""
        if self.limit_s:
            now = time.monotonic()
            self._until = now + self.limit_s + LAST_S
            if now - self._armed > min(1.0, self.limit_s / 4):  # each time starts a thread, a tenth of a millisecond
                self._armed = now
                faulthandler.dump_traceback_later(self.limit_s, file=self._file)

    def close(self) -> None:
        """Stop watching. Remove an empty file."""
        if self.limit_s:
            self.limit_s, self._until = 0.0, float("inf")
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()

    def _end(self) -> None:
        while self.limit_s:
            left = self._until - time.monotonic()
            if left <= 0:
                print(f"tokenscale: no step for {self.limit_s:g} s; stacks: {self.path}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(CODE)
            time.sleep(min(left, self.limit_s, 5.0))
