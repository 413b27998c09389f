"""Read batches ahead in a thread."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from tokenscale.data.batches.batch import Batch, Batches


class Prefetcher:
    """Batches and states of a source, read by a thread at most `depth` batches ahead.

    Sources reuse their buffers, so the thread copies each batch. The thread starts at the first `next`. `close` ends it
    and resets the source to the consumer's state, so that no batch is lost. Call all methods from one thread.
    """

    def __init__(self, batches: Batches, depth: int = 1):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.vocabulary_size = batches.vocabulary_size
        self._batches, self._depth = batches, depth
        self._state = batches.state()
        self._reader: _Reader | None = None

    def rows_per_epoch(self) -> float:
        return self._batches.rows_per_epoch()

    def next(self) -> Batch:
        """Return the next batch.

        An error of the source is raised after the batches before it, and ends the thread. Another call continues at the
        source's state, as without this class.
        """
        if self._reader is None:
            self._reader = _Reader(self._batches, self._depth)
        item = self._reader.take()
        if isinstance(item, BaseException):
            self._stop()
            raise item
        batch, self._state = item
        return batch

    def state(self) -> dict[str, Any]:
        return self._state

    def seek(self, state: dict[str, Any]) -> None:
        """Continue at a state. Batches read ahead are dropped."""
        self._stop()
        self._batches.seek(state)
        self._state = self._batches.state()

    def close(self) -> None:
        """End the thread after its current batch. `next` would start another one."""
        if self._reader is not None:
            self.seek(self._state)

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None


#: batch with the source's state after it, or an exception of the source
Item = tuple[Batch, dict[str, Any]] | BaseException


class _Reader:
    """Thread that reads batches into a queue."""

    def __init__(self, batches: Batches, depth: int):
        self._batches = batches
        self._ready: SimpleQueue[Item] = SimpleQueue()
        self._free_slots = threading.Semaphore(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._read, name="tokenscale-prefetch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            self._free_slots.acquire()
            if self._stopped:
                return
            try:
                self._ready.put((self._batches.next().copy(), self._batches.state()))
            except BaseException as error:
                self._ready.put(error)
                return

    def take(self) -> Item:
        item = self._ready.get()
        self._free_slots.release()
        return item

    def stop(self) -> None:
        self._stopped = True
        self._free_slots.release()
        self._thread.join()
