"""Reads the layouts that sessions announce in a thread, because a long one would hold the loop of all jobs.

The verdict about a layout is kept by its text. So only the first session of a layout waits for the thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from fabric.errors import FabricError, ProtocolError
from fabric.protocol.rules.layout_text import known_layout, layout_summary


class LayoutReader:
    """One thread for all jobs. A job has at most one layout in it, so no job waits for many of another."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._of_job: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, job: str, text: str) -> None:
        """Read this layout. Raises ProtocolError for a text that is not the layout of a whole model."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "fabric-layouts")
        lock = self._of_job.get(job)
        if lock is None:
            lock = self._of_job[job] = asyncio.Lock()
        async with lock:
            await asyncio.get_running_loop().run_in_executor(self._thread, layout_summary, text)


class LayoutGate:
    """Holds the messages of one connection back while the thread reads the layout of its session.

    ``take`` gets each held message once the layout is read, or ``refuse`` the error.
    """

    def __init__(self, reader: LayoutReader, job: str, transport: asyncio.Transport | None) -> None:
        self._reader = reader
        self._job = job
        self._transport = transport
        self._held: list[str] = []
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_shut(self) -> bool:
        return self._reading is not None

    def holds(self, text: str) -> bool:
        """Keep this message while the gate is shut; return whether it was kept."""
        if self._reading is None:
            return False
        self._held.append(text)
        return True

    def reads(
        self, layout: str, text: str, take: Callable[[str], bool], refuse: Callable[[FabricError], None]
    ) -> bool:
        """Shut the gate and read the layout of the session in ``text``, unless the layout is known."""
        if not layout or known_layout(layout) is not None:
            return False
        if self._transport is not None:
            self._transport.pause_reading()
        self._reading = asyncio.get_running_loop().create_task(self._read(layout, take, refuse))
        self._held.append(text)
        return True

    def close(self) -> None:
        """The connection has ended: forget its messages."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(
        self, layout: str, take: Callable[[str], bool], refuse: Callable[[FabricError], None]
    ) -> None:
        error: FabricError | None = None
        try:
            await self._reader.read(self._job, layout)
        except ProtocolError as refusal:
            error = refusal
        self._reading, held = None, self._held
        self._held = []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        if error is not None:
            refuse(error)
            return
        for text in held:
            take(text)
