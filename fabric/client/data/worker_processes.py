"""Worker processes that read micro-batches ahead: those of torch's DataLoader.

The DataLoader reads without end, in the order of ``_Requests``: the micro-batches of the step under way, then
this replica's share of the steps after it. After a change of the membership the requests change too. The
micro-batches that were requested before and that nobody needs here any more are dropped as they come.

Before each micro-batch a worker seeds the generators from (seed, step, micro-batch), so every replica that
reads it draws the same numbers. A worker ends with its trainer, also where the trainer is killed.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from fabric.client.data.fetching import IndexFetcher
from fabric.errors import ConfigError
from fabric.runtime.system_calls import die_with

Key = tuple[int, int]  # step and micro-batch


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How batches are read ahead. Except ``workers`` they are those of torch's DataLoader."""

    workers: str = "processes"  # or "threads", which share the data set
    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    pin_memory: bool = False
    timeout: float = 0

    def __post_init__(self) -> None:
        if self.workers not in ("processes", "threads"):
            raise ConfigError(f'workers is "{self.workers}": it must be "processes" or "threads"')


class _Requests(Sampler[Any]):
    """The order in which the workers read. It never ends: without anything to read it gives None."""

    def __init__(self, items: Callable[[int, int], Sequence[Any]], steps_to_try: int) -> None:
        self.sent: deque[Key | None] = deque()  # requests whose results have not come, oldest first
        self._items = items
        self._steps_to_try = steps_to_try  # so many steps may follow each other without a sample here
        self._known: set[Key] = set()  # requested, and not taken yet
        self._first: deque[Key] = deque()
        self._share: tuple[int, ...] = ()
        self._next: Key = 0, 0  # the next step, and the place in its share

    def ask(self, keys: Iterable[Key]) -> None:
        """Read these before all others."""
        self._first = deque(keys)

    def go_on(self, step: int, share: Iterable[int]) -> None:
        """Read ``share`` of each step from ``step`` on."""
        self._share, self._next = tuple(share), (step, 0)

    def forget(self, key: Key) -> None:
        """The result of ``key`` was taken or dropped."""
        self._known.discard(key)

    def __iter__(self) -> Iterator[Any]:
        while True:
            key = self._choose()
            self.sent.append(key)
            if key is None:
                yield None
            else:
                self._known.add(key)
                yield key, self._items(*key)

    def _choose(self) -> Key | None:
        while self._first:
            key = self._first.popleft()
            if key not in self._known:
                return key
        last = self._next[0] + self._steps_to_try
        while self._share and self._next[0] <= last:
            step, place = self._next
            self._next = (step, place + 1) if place + 1 < len(self._share) else (step + 1, 0)
            key = step, self._share[place]
            if key not in self._known and self._items(*key):
                return key
        return None


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of the data set or of the collate function, for the one that asks for this micro-batch."""

    error: ExceptionWrapper


class _Reading(Dataset[Any]):
    """In a worker: answers a request with the micro-batch."""

    def __init__(self, fetcher: IndexFetcher) -> None:
        self.fetcher = fetcher

    def __getitem__(self, request: Any) -> Any:
        if request is None:
            return None
        (step, micro_batch), items = request
        try:
            return self.fetcher.seeded(step, micro_batch, items)
        except Exception:  # noqa: BLE001  (raised in the trainer, where the micro-batch is needed)
            return _Failed(ExceptionWrapper(where="in a worker of session.loader"))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Begin:
    """In a worker: what it does before its first request."""

    dataset: Any
    user: Callable[[int], None] | None
    trainer: int  # process id, if the worker ends with the thread that starts it; else 0

    def __call__(self, worker: int) -> None:
        if os.getppid() == self.trainer:  # else a fork server started it, which ends with the trainer
            # A worker keeps the trainer's ports and memory open, so it must not outlive the trainer.
            die_with(self.trainer, signal.SIGKILL)()
        # The user's functions find their own data set, as without fabric.
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.user is not None:
            self.user(worker)


class WorkerProcesses:
    """Reads micro-batches by ``count`` worker processes. They start with the first request."""

    def __init__(
        self,
        fetcher: IndexFetcher,
        items: Callable[[int, int], Sequence[Any]],
        count: int,
        options: WorkerOptions,
        replica: str,
        steps_to_try: int,
    ) -> None:
        self._fetcher, self._count, self._options, self._replica = fetcher, count, options, replica
        self._requests = _Requests(items, steps_to_try)
        self._ready: dict[Key, Any] = {}
        self._step = -1
        self._batches: Iterator[Any] | None = None

    def _start(self) -> Iterator[Any]:
        """Start the workers, which read the requests from now on."""
        fetcher, options = self._fetcher, self._options
        # Workers that seed a generator of their own by ``get_worker_info().seed`` differ between replicas.
        generator = torch.Generator()
        generator.manual_seed(xxhash.xxh3_64_intdigest(f"{fetcher.seed} {self._replica}".encode()) >> 1)
        # The kernel ends a worker with the thread that started it.
        main = threading.current_thread() is threading.main_thread()
        return iter(
            DataLoader(
                _Reading(fetcher),
                batch_size=None,
                sampler=self._requests,
                num_workers=self._count,
                collate_fn=_unchanged,
                pin_memory=options.pin_memory,
                timeout=options.timeout,
                worker_init_fn=_Begin(fetcher.dataset, options.worker_init_fn, os.getpid() if main else 0),
                multiprocessing_context=options.multiprocessing_context,
                generator=generator,
                prefetch_factor=options.prefetch_factor,
            )
        )

    def read_ahead(self, step: int, micro_batches: Sequence[int]) -> None:
        """These micro-batches of ``step`` are needed now; drop all others of it and of earlier steps."""
        wanted = [(step, i) for i in micro_batches]
        for key in [k for k in self._ready if k[0] <= step and k not in wanted]:
            self._drop(key)
        self._requests.ask(wanted)
        if step != self._step:
            self._step = step
            self.expect(step + 1, micro_batches)
        if wanted and self._batches is None:
            self._batches = self._start()

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        """Read these micro-batches of ``step`` and of the steps after it while there is time."""
        self._requests.go_on(step, micro_batches)

    def fetch(self, step: int, micro_batch: int) -> Any:
        """Return one micro-batch, or raise the error with which a worker read it."""
        wanted = step, micro_batch
        if self._batches is None:
            self.read_ahead(step, [micro_batch])
        if wanted not in self._ready and wanted not in self._requests.sent:
            self._requests.ask([wanted])
        while wanted not in self._ready:
            assert self._batches is not None
            result, key = next(self._batches), self._requests.sent.popleft()
            if key is not None:
                self._ready[key] = result
                if key[0] < step:
                    self._drop(key)
        result = self._ready.pop(wanted)
        self._requests.forget(wanted)
        if isinstance(result, _Failed):
            result.error.reraise()  # type: ignore[no-untyped-call]
        return result

    def _drop(self, key: Key) -> None:
        del self._ready[key]
        self._requests.forget(key)

    def close(self) -> None:
        """End the workers."""
        self._batches = None


def _unchanged(batch: Any) -> Any:
    return batch
