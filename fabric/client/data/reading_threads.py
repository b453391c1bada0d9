"""Threads that read micro-batches ahead. They share the data set and the process's random generators."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fabric.client.data.fetching import Fetcher


class ReadingThreads:
    """``items`` gives the items of a micro-batch; only the loop's thread calls it."""

    def __init__(self, fetcher: Fetcher, items: Callable[[int, int], Sequence[Any]], count: int) -> None:
        self._fetcher = fetcher
        self._items = items
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self._pool = ThreadPoolExecutor(count, "fabric-loader")

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read the micro-batches that will come next if nothing changes."""
        for micro_batch in micro_batches:
            if (step, micro_batch) not in self._ahead:
                items = self._items(step, micro_batch)
                self._ahead[step, micro_batch] = self._pool.submit(self._fetcher.read, step, items)

    def read_ahead(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read these micro-batches, and discard all others that were read ahead."""
        wanted = {(step, micro_batch) for micro_batch in micro_batches}
        for key in [k for k in self._ahead if k not in wanted]:
            self._ahead.pop(key).cancel()
        self.expect(step, sorted(micro_batch for _, micro_batch in wanted))

    def fetch(self, step: int, micro_batch: int) -> Any:
        """Return one micro-batch."""
        future = self._ahead.pop((step, micro_batch), None)
        if future is not None:
            return future.result()
        # A data set or collate function that draws numbers draws the same ones on every replica.
        return self._fetcher.seeded(step, micro_batch, self._items(step, micro_batch))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
