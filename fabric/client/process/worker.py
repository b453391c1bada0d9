"""A daemon thread that runs jobs in order.

A daemon, because a trainer whose main thread has raised must exit even while an exchange or a fetch blocks.
"""

import queue
import threading
from collections.abc import Callable

from fabric.runtime.priority import lower_priority


class Worker:
    """Runs one job at a time. A job handles the errors that it expects; ``on_crash`` gets all others.

    ``background`` jobs get only the processor time that the training leaves unused.
    """

    def __init__(
        self, name: str, on_crash: Callable[[BaseException], None], background: bool = False
    ) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_crash = on_crash
        self._background = background
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def settle(self, within_s: float) -> None:
        """Return when the jobs queued so far are done, at most ``within_s`` from now."""
        done = threading.Event()
        self.submit(done.set)
        done.wait(within_s)

    def close(self, within_s: float) -> None:
        """End after the queued jobs; wait at most ``within_s``."""
        self._jobs.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        if self._background:
            lower_priority()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  (the one supervisor of this thread)
                self._on_crash(error)
                return
