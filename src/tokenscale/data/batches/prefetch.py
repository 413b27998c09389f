"""Batches read ahead, by one thread."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from tokenscale.data.batches.batch import Batch, Batches


class Ahead:
    """The same batches and states, read by a thread while the consumer works; `depth` of them at most lie ready.

    Sources fill the same buffers again and again, so the thread copies each batch: it may be kept for as long as one
    likes. The thread starts with the first `next`; `close` ends it and puts the source back to where the consumer is,
    so that nothing read ahead is lost. All methods are called from one thread.
    """

    def __init__(self, batches: Batches, depth: int = 1):
        if depth < 1:
            raise ValueError(f"depth {depth}: at least one batch is read ahead")
        self.vocabulary_size = batches.vocabulary_size
        self._batches, self._depth = batches, depth
        self._state = batches.state()
        self._reader: _Reader | None = None

    def rows_per_epoch(self) -> float:
        """See `batch.Batches`; ask before the first batch, or after `close`."""
        return self._batches.rows_per_epoch()

    def next(self) -> Batch:
        """The next batch. An error of the source comes out here, in its turn, and ends the thread; asking again reads
        on from where the source stands, as without this class."""
        if self._reader is None:
            self._reader = _Reader(self._batches, self._depth)
        item = self._reader.take()
        if isinstance(item, BaseException):
            self._stop()
            raise item
        batch, self._state = item
        return batch

    def state(self) -> dict[str, Any]:
        """The source's state behind the batch that was handed out last."""
        return self._state

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a state; what was read ahead is thrown away."""
        self._stop()
        self._batches.seek(state)
        self._state = self._batches.state()

    def close(self) -> None:
        """End the thread, when it has read what it is reading. `next` would start another."""
        if self._reader is not None:
            self.seek(self._state)

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None


#: a batch with the source's state behind it, or what the source raised in its place
Item = tuple[Batch, dict[str, Any]] | BaseException


class _Reader:
    """The thread, and what it has read."""

    def __init__(self, batches: Batches, depth: int):
        self._batches = batches
        self._ready: SimpleQueue[Item] = SimpleQueue()
        self._places = threading.Semaphore(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._read, name="tokenscale-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            self._places.acquire()
            if self._stopped:
                return
            try:
                self._ready.put((self._batches.next().copy(), self._batches.state()))
            except BaseException as error:
                self._ready.put(error)
                return

    def take(self) -> Item:
        item = self._ready.get()
        self._places.release()
        return item

    def stop(self) -> None:
        self._stopped = True
        self._places.release()
        self._thread.join()
