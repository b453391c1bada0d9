"""The one driver that joins a pure core to an event loop.

It feeds events, performs the returned effects in order, and calls the core again at its next deadline.
Events fed while effects are being performed are queued, so a core is never entered twice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
_Event = TypeVar("_Event", contravariant=True)
_Effect = TypeVar("_Effect")


class Core(Protocol[_Event, _Effect]):
    """What the driver drives: see docs/architecture.md."""

    def handle(self, event: _Event, now: float) -> list[_Effect]: ...

    def next_deadline(self) -> float | None: ...


class Driver(Generic[EventT, EffectT]):
    """Construct it inside the running loop; use it from that loop's thread.

    ``tick`` is the event that says only that time passed. An exception out of the core or out of
    ``perform`` is a defect: it is given to ``on_crash`` once, and nothing is fed any more.
    """

    def __init__(
        self,
        core: Core[EventT, EffectT],
        perform: Callable[[EffectT], None],
        *,
        tick: EventT,
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._perform = perform
        self._tick = tick
        self._on_crash = on_crash
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._queue: deque[EventT] = deque()
        self._busy = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer goes off

    def feed(self, event: EventT) -> None:
        """Hand one event to the core and perform what it orders; nothing happens after ``close``."""
        if self._closed:
            return
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue and not self._closed:
                for effect in self._core.handle(self._queue.popleft(), self._clock()):
                    self._perform(effect)
            self._arm()
        except Exception as error:  # noqa: BLE001  (a defect in the core ends its owner, whatever it is)
            self.close()
            self._on_crash(error)
        finally:
            self._busy = False

    def close(self) -> None:
        """Feed nothing more."""
        self._closed = True
        self._queue.clear()
        self._disarm()

    def _arm(self) -> None:
        """A timer that is due before the deadline stays: deadlines mostly move away, and it looks again."""
        deadline = None if self._closed else self._core.next_deadline()
        if deadline is None or (self._timer is not None and self._due <= deadline):
            return
        self._disarm()
        self._due = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        deadline = None if self._closed else self._core.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self.feed(self._tick)
        else:
            self._arm()
