"""Virtual time: one heap of actions, and processes that can be killed, stopped and continued.

Everything random in a world comes from one ``random.Random(seed)``, and actions of the same instant run in
the order in which they were scheduled, so a seed replays exactly.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from operator import itemgetter

Action = Callable[[], None]


class Clockwork:
    """The time, the queue, the randomness, the trace and the coverage counters of one world."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.skew = 0.001  # the largest error of a clock's rate
        self.counts: Counter[str] = Counter()
        self.tracing = tracing
        self.lines: list[str] = []
        # Called for each event and effect: the time, the process, "<" or ">", and the value.
        self.observe: Callable[[float, str, str, object], None] | None = None
        self._queue: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, delay: float, action: Action) -> None:
        """Run ``action`` in ``delay`` seconds."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, action))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Run actions until ``done`` or time ``until``; return whether ``done`` came."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if done():
                return True
        self.now = until
        return done()

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def trace(self, who: str, what: object) -> None:
        if self.tracing:
            self.lines.append(f"{self.now:9.4f} {who:<8} {what}")

    def show(self, who: str, sign: str, value: object, prefix: str = "") -> None:
        """Pass an event (``<``) or effect (``>``) of a core to the trace and the observer."""
        if self.tracing:
            self.trace(who, f"{prefix}{sign} {value}")
        if self.observe is not None:
            self.observe(self.now, who, sign, value)

    @property
    def watched(self) -> bool:
        """Whether a trace or an observer needs events and effects."""
        return self.tracing or self.observe is not None

    @property
    def pending(self) -> int:
        return len(self._queue)


class Process:
    """A simulated process with its own clock, which can be stopped, continued and ended."""

    def __init__(self, clockwork: Clockwork, name: str) -> None:
        self.clockwork = clockwork
        self.name = name
        self.alive = True
        self.paused = False
        # for each waiting action: whether a timer brought it, and the action
        self._backlog: list[tuple[bool, Action]] = []
        self._pauses = 0
        self._offset = clockwork.between(0.0, 1000.0)
        self._rate = clockwork.between(1.0 - clockwork.skew, 1.0 + clockwork.skew)
        self._ticks, self._began = 0, clockwork.now

    def clock(self) -> float:
        """This process's monotonic clock."""
        return self._offset + self.clockwork.now * self._rate

    def seconds_until(self, deadline: float) -> float:
        """World seconds until this process's clock shows ``deadline``."""
        return max(0.0, (deadline - self.clock()) / self._rate)

    def after(self, delay: float, action: Action) -> None:
        """Run ``action`` in this process in ``delay`` seconds."""
        self.clockwork.at(delay, lambda: self.run(action, is_timer=True))

    def run(self, action: Action, is_timer: bool = False) -> None:
        """Run ``action`` now, or when the process is continued, or never."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((is_timer, action))
        else:
            action()

    def count_tick(self) -> None:
        """Count a tick that the core has asked for. A core that asks without an end would spin."""
        self._ticks += 1
        lived_s = self.clockwork.now - self._began
        assert self._ticks <= 60 * lived_s + 100, f"{self.name}: {self._ticks} ticks in {lived_s:.1f} s"

    def pause(self) -> None:
        if self.alive:
            self.paused = True

    def resume(self) -> None:
        """Continue the process: it handles what has arrived meanwhile in the order of arrival. After a hang
        (not a stop) the event loop handles its sockets before its timers.
        """
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, []
        self._pauses += 1
        # Use a separate random source, so that the order after a pause changes nothing else in the world.
        chance = random.Random(f"{self.clockwork.seed}/{self.name}/{self._pauses}")
        if chance.random() < 0.5:
            self.clockwork.counts["path: sockets before timers"] += 1
            backlog.sort(key=itemgetter(0))
        for _, action in backlog:
            self.clockwork.at(0.0, lambda action=action: self.run(action))

    def kill(self) -> None:
        self.alive = False
        self.paused = False
        self._backlog.clear()
