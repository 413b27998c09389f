"""Progress of a long job: one live line on a terminal, a line every few seconds in a log."""

import sys
import time

#: seconds between two lines in a log
LOG_S = 5.0


class Progress:
    """Count documents and bytes of text and print progress. An update costs one clock reading."""

    def __init__(self, what: str, total: int | None = None, total_bytes: int | None = None):
        self.what = what
        self.total = total
        self.total_bytes = total_bytes
        self.stream = sys.stderr
        self.live = sys.stderr.isatty()
        self.documents = self.bytes = 0
        self.start = self.last = time.monotonic()

    def __call__(self, documents: int, utf8_bytes: int) -> None:
        self.documents += documents
        self.bytes += utf8_bytes
        now = time.monotonic()
        if now - self.last >= (0.2 if self.live else LOG_S):
            self.last = now
            line = f"\r\033[K{self.line()}" if self.live else f"{self.line()}\n"
            self.stream.write(line)
            self.stream.flush()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def line(self) -> str:
        """Return the progress line: documents, megabytes, rate, seconds, and the estimated
        remaining time if known.
        """
        of = f" of {self.total:,}" if self.total else ""
        speed = self.bytes / 1e6 / max(self.seconds, 1e-9)
        amount = (
            f"{self.bytes / 1e6:.1f}"
            + (f" of {self.total_bytes / 1e6:.1f}" if self.total_bytes else "")
            + " MB"
        )
        if self.documents:
            amount = f"{self.documents:,}{of} documents, {amount}"
        if self.total:
            share = self.documents / self.total
        elif self.total_bytes:
            share = self.bytes / self.total_bytes
        else:
            share = 0
        left = f", {self.seconds * (1 / share - 1):.0f} s left" if 0 < share < 1 else ""
        return f"{self.what}: {amount}, {speed:.1f} MB/s, {self.seconds:.1f} s{left}"

    def close(self) -> None:
        if self.live:
            self.stream.write("\r\033[K")
            self.stream.flush()
