"""Read batches ahead in a thread."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tokenscale.data.batches.batch import Batch, Batches, WrappedBatches


class Prefetcher(WrappedBatches):
    """Batches and states of a source, read by a thread one batch ahead.

    Sources reuse their buffers, so the thread copies each batch. The thread starts at the first `next`. `close` ends it
    and resets the source to the consumer's state, so that no batch is lost. Call all methods from one thread.
    """

    def __init__(self, batches: Batches):
        super().__init__(batches)
        self._state = batches.state()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[tuple[Batch, dict[str, Any]]]

    def next(self) -> Batch:
        """Return the next batch.

        An error of the source is raised after the batches before it, and ends the thread. Another call continues at the
        source's state, as without this class.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "tokenscale-prefetch")
            self._ahead = self._pool.submit(self._read)
        if (error := self._ahead.exception()) is not None:
            self._stop()
            raise error
        batch, self._state = self._ahead.result()
        self._ahead = self._pool.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, dict[str, Any]]:
        return self._batches.next().copy(), self._batches.state()

    def state(self) -> dict[str, Any]:
        return self._state

    def seek(self, state: dict[str, Any]) -> None:
        """Continue at a state. Batches read ahead are dropped."""
        self._stop()
        self._batches.seek(state)
        self._state = self._batches.state()

    def close(self) -> None:
        """End the thread after its current batch. `next` would start another one."""
        if self._pool is not None:
            self.seek(self._state)

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
