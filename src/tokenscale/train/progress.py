"""What a person sees while a run trains: a live line on a terminal, sparse lines in a log."""

import sys
import time


class Progress:
    """Prints for rank 0 only. On a terminal the line is rewritten; elsewhere one line in `every_s` seconds."""

    def __init__(self, steps: int | None, *, enabled: bool, every_s: float = 30.0):
        self.steps, self.enabled, self.every_s = steps, enabled, every_s
        self.live = enabled and sys.stdout.isatty()
        self._start = time.monotonic()
        self._last = 0.0
        self._first: float | None = None

    def say(self, text: str) -> None:
        """One line that stays."""
        if self.enabled:
            print(("\r\033[K" if self.live else "") + text, flush=True)

    def step(self, done: int, loss: float, useful_per_s: float, share: float) -> None:
        """`done` steps are behind us, `share` of the budget."""
        if not self.enabled:
            return
        now = time.monotonic()
        last = done == self.steps
        if self._first is None:  # the first step warms everything up, and a resumed run begins where it was
            self._first, self._start = share, now
        if not last and now - self._last < (0.2 if self.live else self.every_s) and done > 1:
            return
        self._last = now
        text = f"step {done}/{self.steps or '?'}  loss {loss:.4f}  {useful_per_s:,.0f} useful tokens/s"
        if share > self._first:
            text += f"  {(now - self._start) / (share - self._first) * (1 - share):.0f} s left"
        if self.live:
            print("\r\033[K" + text, end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)
