"""The one driver that joins a pure core to an event loop.

The driver feeds events to the core, performs the returned effects in order, and calls the core again at its
next deadline. Any thread may feed an event; it goes into a queue. One thread at a time holds the *turn*: it
hands the core all queued events and performs their effects. A thread that feeds takes the turn if it is free.
So no two threads enter the core at once, effects keep their order, and a thread with an event wakes no other
thread. An effect that only the loop's thread may perform passes the turn to that thread, with all effects
after it.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fabric.runtime.system_calls import seconds_since_boot

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
_Event = TypeVar("_Event", contravariant=True)
_Effect = TypeVar("_Effect")

_RETRY_S = 0.001


class Core(Protocol[_Event, _Effect]):
    """A core, as the driver sees it: see docs/architecture.md."""

    def handle(self, event: _Event, now: float) -> list[_Effect]: ...

    def next_deadline(self) -> float | None: ...


class Driver(Generic[EventT, EffectT]):
    """Construct it inside the running loop, and ``close`` it there; ``feed`` from any thread.

    ``tick`` is the event that says only that time passed. ``perform`` gets the types in
    ``thread_safe_effects`` on any thread, and all others on the loop's thread. An exception out of the core
    or out of ``perform`` is a defect: the driver passes it to ``on_crash`` once, and feeds nothing more.
    """

    def __init__(
        self,
        core: Core[EventT, EffectT],
        perform: Callable[[EffectT], None],
        *,
        tick: EventT,
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = seconds_since_boot,
        thread_safe_effects: frozenset[type] = frozenset(),
    ) -> None:
        self._core = core
        self._perform = perform
        self._tick = tick
        self._on_crash = on_crash
        self._clock = clock
        self._thread_safe_effects = thread_safe_effects
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._turn = threading.Lock()  # the lock's holder may pass it on to the loop's thread
        self._queue: deque[EventT] = deque()
        self._effects: deque[EffectT] = deque()
        self._closed = self._failed = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # the time of the armed timer

    def feed(self, event: EventT) -> None:
        """Hand one event to the core and perform its effects, or leave both to the thread that holds the
        turn.

        Does nothing after ``close``.
        """
        if self._closed:
            return
        try:
            self._queue.append(event)
            self._take_turns()
        except BaseException as error:
            # Ctrl-C interrupts the main thread anywhere, so the driver may have lost the turn.
            self._fail(error)
            raise

    def close(self) -> None:
        """Feed nothing more. The queue stays as it is: the turn's holder may be about to take from it."""
        self._closed = True
        self._on_loop(self._disarm)

    def _take_turns(self) -> None:
        # Check the queue again after each turn: a thread that queued an event at its very end found the turn
        # taken.
        while self._queue and not self._closed and self._turn.acquire(blocking=False):
            self._work()

    def _work(self, timed: bool = False) -> None:
        """Work, holding the turn, until the queue is empty or the loop's thread must take the turn."""
        here = threading.get_ident() == self._thread
        try:
            due = self._core.next_deadline() if timed and not self._closed else None
            if due is not None and due <= self._clock():
                self._queue.append(self._tick)
            while not self._failed and (self._effects or (self._queue and not self._closed)):
                while self._effects and not self._failed:
                    if not here and type(self._effects[0]) not in self._thread_safe_effects:
                        self._on_loop(self._go_on)
                        return
                    self._perform(self._effects.popleft())
                if self._queue and not self._closed:
                    self._effects.extend(self._core.handle(self._queue.popleft(), self._clock()))
            # A timer that is armed for an earlier time arms the next one.
            deadline = None if self._closed else self._core.next_deadline()
            if deadline is not None and deadline < self._due:
                self._due = deadline
                self._on_loop(self._set_timer)
        except Exception as error:  # noqa: BLE001  (a defect in the core ends its owner, whatever it is)
            self._effects.clear()
            self._fail(error)
        else:
            self._turn.release()

    def _fail(self, error: BaseException) -> None:
        """End the driver: it keeps the turn, so that no thread works again."""
        failed, self._failed = self._failed, True
        self.close()
        if not failed:
            self._on_crash(error)

    def _go_on(self) -> None:
        """Go on in the loop's thread, to which the turn was passed."""
        self._work()
        self._take_turns()

    def _on_loop(self, work: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            work()
            return
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(work)

    def _set_timer(self) -> None:
        self._disarm()
        if not self._closed and self._due < math.inf:
            self._timer = self._loop.call_later(max(0.0, self._due - self._clock()), self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        if self._closed:
            return
        if not self._turn.acquire(blocking=False):
            # Another thread holds the turn; this timer wakes the driver when that thread is done.
            self._timer = self._loop.call_later(_RETRY_S, self._on_timer)
            return
        self._timer, self._due = None, math.inf
        self._work(timed=True)
        self._take_turns()
