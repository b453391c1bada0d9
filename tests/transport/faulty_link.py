"""A wrapper that makes any Link misbehave, from a seed: delays, stalls, sudden ends.

Order is kept whatever the delay, as on a real stream: a network delays and cuts, it does not reorder or
lose single messages of a link. A stalled direction holds its messages until it is released.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.errors import ProtocolError
from fabric.transport.link import Link, OnClosed, OnMessage


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """How a link misbehaves. ``cut_probability`` is per message sent; delays are of each direction."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    cut_probability: float = 0.0


@dataclass(slots=True)
class _Lane:
    """One direction: what is under way, oldest first, with the time when each may arrive."""

    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    stalled: bool = False
    timer: asyncio.TimerHandle | None = None

    def take_due(self, now: float) -> bytes | None:
        """The oldest message if it may arrive now, else None."""
        if self.stalled or not self.waiting or self.waiting[0][0] > now:
            return None
        return self.waiting.popleft()[1]

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class FaultyLink:
    """``inner`` with ``faults`` drawn from ``rng``; the same seed and messages give the same faults."""

    def __init__(self, inner: Link, rng: random.Random, faults: LinkFaults) -> None:
        self._inner = inner
        self._rng = rng
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._out = _Lane()
        self._in = _Lane()
        self._arrived = asyncio.Event()

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def clean(self) -> bool:
        return self._inner.clean

    def send(self, data: bytes) -> bool:
        """Send after a drawn delay, or cut the link instead: see Link."""
        if self._inner.reason:
            return False
        if self._rng.random() < self._faults.cut_probability:
            self.cut()
            return False
        self._enqueue(self._out, data)
        self._send_due()
        return not self._inner.reason

    async def run(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver with the delays and stalls of the incoming direction: see Link."""
        inner = self._loop.create_task(self._inner.run(self._arrive, self._end))
        try:
            while not inner.done() or (self._in.waiting and not self._in.stalled):
                self._arrived.clear()
                while (data := self._in.take_due(self._loop.time())) is not None:
                    on_message(data)
                self._wake_later(self._in, self._arrived.set)
                if not inner.done() or self._in.waiting:
                    await self._arrived.wait()
        except ProtocolError as error:
            self.abort(f"{self.peer} sent what cannot be used: {error}")
        finally:
            self.abort(f"the link to {self.peer} was dropped here")
            on_closed(self._inner.reason)
            await inner

    async def close(self, linger_s: float = 1.0) -> None:
        """Send messages under way first, then close the inner link: see Link."""
        while self._out.waiting and not self._inner.reason:
            self._inner.send(self._out.waiting.popleft()[1])
        self._out.stop_timer()
        await self._inner.close(linger_s)

    def abort(self, reason: str) -> None:
        """Close at once: see Link."""
        self._out.stop_timer()
        self._in.stop_timer()
        self._in.waiting.clear()
        self._inner.abort(reason)

    def cut(self) -> None:
        """The connection drops, as when a cable is pulled and the kernel has noticed."""
        self.abort(f"{self.peer} is gone: the link was cut by a fault")

    def stall_out(self, stalled: bool = True) -> None:
        """Hold (or release) what this end sends."""
        self._out.stalled = stalled
        self._send_due()

    def stall_in(self, stalled: bool = True) -> None:
        """Hold (or release) what this end receives."""
        self._in.stalled = stalled
        self._arrived.set()

    def _arrive(self, data: bytes) -> None:
        self._enqueue(self._in, data)
        self._arrived.set()

    def _end(self, _reason: str) -> None:
        # Wake run() one turn later, so that its loop sees the finished inner task.
        self._loop.call_soon(self._arrived.set)

    def _enqueue(self, lane: _Lane, data: bytes) -> None:
        due_s = self._loop.time() + self._rng.uniform(*self._faults.delay_s)
        lane.waiting.append((due_s, data))

    def _send_due(self) -> None:
        while (data := self._out.take_due(self._loop.time())) is not None:
            self._inner.send(data)
        self._wake_later(self._out, self._send_due)

    def _wake_later(self, lane: _Lane, wake: Callable[[], None]) -> None:
        lane.stop_timer()
        # Messages that arrived before the end are still delivered; unsent ones are lost.
        if lane.waiting and not lane.stalled and (lane is self._in or not self._inner.reason):
            lane.timer = self._loop.call_at(lane.waiting[0][0], wake)
