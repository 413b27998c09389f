"""A rank that stands still writes where it is, and ends: else a hung exchange holds all nodes to the time limit."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

#: seconds between a rank's word on where it is and its end, in which the others write theirs
LAST_S = 2.0
#: exit code of a rank that stood still
CODE = 70


class Watch:
    """`beat()` once a step; about `limit_s` seconds after the last one, all threads' stacks go to `file`. 0: never.

    The stacks are written by a thread that needs no Python, so that code which never lets go of it is found, too.
    """

    def __init__(self, file: Path, limit_s: float):
        self.limit_s, self.path = limit_s, file
        self._until, self._armed = float("inf"), -float("inf")
        if limit_s:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(file, "w", encoding="utf-8")  # held: it must be there when nothing else can be done
            self.beat()
            threading.Thread(target=self._end, name="standing", daemon=True).start()

    def beat(self) -> None:
        """Something was done."""
        if self.limit_s:
            now = time.monotonic()
            self._until = now + self.limit_s + LAST_S
            if now - self._armed > min(1.0, self.limit_s / 4):  # each time starts a thread, a tenth of a millisecond
                self._armed = now
                faulthandler.dump_traceback_later(self.limit_s, file=self._file)

    def close(self) -> None:
        """The end, which may take its time. A file in which nothing stands is removed."""
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
                print(f"tokenscale: no step for {self.limit_s:g} s; where it stands: {self.path}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(CODE)
            time.sleep(min(left, self.limit_s, 5.0))
