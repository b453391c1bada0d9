"""The background tasks of a shell: none dies unnoticed, and all end with their owner.

An asyncio task that raises keeps its exception until another task awaits it. Here the owner gives one
callback for all failed tasks, and each failure is logged with its traceback.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

# Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with its result. Some code
# catches a cancellation by mistake. So a task that still runs after this many seconds is cancelled again.
_CANCEL_AGAIN_S = 2.0


class Tasks:
    """Start tasks with ``start``; end all of them with ``close``.

    ``on_death`` is called with the name and the exception of every task that ended by one, other than by
    cancellation.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None]) -> None:
        self._on_death = on_death
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` until it ends or ``close`` is called; after ``close`` it is not begun at all."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end; ``on_death`` still hears of tasks that fail meanwhile."""
        self._closed = True
        running = set(self._running)
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the task %s died", task.get_name(), exc_info=error)
            self._on_death(task.get_name(), error)


_JOIN_S = 2.0
Result = TypeVar("Result")


class BackgroundLoop:
    """Runs from construction to ``close``; its coroutines share only plain values with other loops."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        # A daemon, because it must not keep a process alive whose main loop ended by an exception.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Begin ``work`` on the loop; cancelling the future cancels it. Safe from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel all running work, wait briefly for its end, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        running = asyncio.all_tasks(self._loop)
        for task in running:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        self._loop.close()
