"""The driver under every schedule of two feeding threads and the loop's own, with few preemptions.

The lock, the queue and the loop are stand-ins. Before each use of one of them, and inside the core and the
effects, another thread may go on. The schedules are enumerated, so nothing here depends on timing.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from runtime.interleaving import Explorer

from fabric.runtime import driver as module
from fabric.runtime.driver import Driver

LOOP, A, B = 0, 1, 2
TICK = "tick"


class TracedLock:
    """A lock that is tried and released at points."""

    def __init__(self, point: Callable[[], None]) -> None:
        self._point, self.is_taken = point, False

    def acquire(self, blocking: bool) -> bool:
        assert not blocking
        self._point()
        taken, self.is_taken = self.is_taken, True
        return not taken

    def release(self) -> None:
        self._point()
        assert self.is_taken, "a turn was given back twice"
        self.is_taken = False


class Queue(deque):
    def __init__(self, point: Callable[[], None]) -> None:
        super().__init__()
        self._point = point

    def __bool__(self) -> bool:
        self._point()
        return len(self) > 0

    def append(self, event: str) -> None:
        self._point()
        super().append(event)

    def popleft(self) -> str:
        self._point()
        return super().popleft()

    def clear(self) -> None:
        self._point()
        super().clear()


@dataclass
class Timer:
    due: float
    work: Callable[[], None]
    after_moves: int  # a timer that found the turn taken fires again only after another actor has moved
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Loop:
    """An event loop whose clock leaps to the next timer as soon as the schedule lets it."""

    point: Callable[[], None]
    explorer: Explorer
    now: float = 0.0
    moves: int = 0
    soon: list[Callable[[], None]] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)

    def call_soon_threadsafe(self, work: Callable[[], None]) -> None:
        self.point()
        self.soon.append(work)

    def call_later(self, delay_s: float, work: Callable[[], None]) -> Timer:
        waits = self.moves + (delay_s == module._RETRY_S)
        self.timers.append(Timer(self.now + delay_s, work, waits))
        return self.timers[-1]

    def due(self) -> Timer | None:
        self.timers = [t for t in self.timers if not t.is_cancelled]
        ripe = [t for t in self.timers if t.after_moves <= self.moves or self.explorer.is_alone(LOOP)]
        return min(ripe, key=lambda t: t.due, default=None)

    def has_work(self) -> bool:
        return bool(self.soon) or self.due() is not None or self.explorer.is_alone(LOOP)

    def run(self) -> None:
        """Run until no work is left and all other threads have ended."""
        while True:
            self.point()
            if self.soon:
                self.soon.pop(0)()
            elif (timer := self.due()) is not None:
                self.timers.remove(timer)
                self.now = max(self.now, timer.due)
                timer.work()
            else:
                return


@dataclass
class InterleavedRun:
    """One run: a core that orders ``orders[event]``, and wants to be called one second after each event."""

    explorer: Explorer
    orders: dict[str, list[object]]
    raises: str = ""
    feeds: dict[object, str] = field(default_factory=dict)  # effect -> the event that performing it feeds
    heard: list[str] = field(default_factory=list)
    ordered: list[object] = field(default_factory=list)
    performed: list[tuple[object, int]] = field(default_factory=list)
    crashes: list[BaseException] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    inside: int = 0
    due: float | None = None
    closed: bool = False
    late: list[str] = field(default_factory=list)  # events handled after close() had returned

    def __post_init__(self) -> None:
        self.loop = Loop(self.point, self.explorer)

    def point(self) -> None:
        if self.explorer.running != LOOP:
            self.loop.moves += 1
        self.explorer.point()

    def make(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module.asyncio, "get_running_loop", lambda: self.loop)
        self.driver = Driver(
            self,
            self.perform,
            tick=TICK,
            on_crash=self.crashes.append,
            clock=lambda: self.loop.now,
            thread_safe_effects=frozenset((str,)),
        )
        self.driver._thread = self.explorer.idents[LOOP]
        self.driver._turn = self.turn = TracedLock(self.point)
        self.driver._queue = Queue(self.point)

    def enter(self, what: str) -> None:
        self.inside += 1
        if self.inside > 1:
            self.faults.append(f"{what} while another thread is at work")

    def handle(self, event: str, now: float) -> list[object]:
        self.enter(f"the core is given {event}")
        self.heard.append(event)
        if self.closed:
            self.late.append(event)
        if event == TICK and (self.due is None or now < self.due):
            self.faults.append(f"a tick at {now} with the deadline {self.due}")
        self.point()
        self.due = None if event == TICK else now + 1.0
        self.inside -= 1
        if event == self.raises:
            raise RuntimeError(event)
        orders = self.orders.get(event, [])
        self.ordered += orders
        return orders

    def next_deadline(self) -> float | None:
        return self.due

    def perform(self, effect: object) -> None:
        self.enter(f"{effect} is performed")
        if not isinstance(effect, str) and self.explorer.running != LOOP:
            self.faults.append(f"{effect} is performed by actor {self.explorer.running}")
        self.point()
        self.performed.append((effect, self.explorer.running))
        if effect in self.feeds:
            self.driver.feed(self.feeds[effect])
        self.inside -= 1

    def check_all(self, fed: list[list[str]]) -> None:
        """Each event was handled once, in its feeder's order; the effects were performed in theirs."""
        events = [x for x in self.heard if x != TICK]
        assert sorted(events) == sorted(x for each in fed for x in each)
        for each in fed:
            assert [x for x in events if x in each] == each
        assert [effect for effect, _ in self.performed] == self.ordered
        assert not self.crashes and not self.faults
        assert self.due is None, "nobody has called the core at its deadline"
        assert not self.turn.is_taken and math.isinf(self.driver._due)


def feed(event: str) -> Callable[[InterleavedRun], None]:
    return lambda world: world.driver.feed(event)


def close(world: InterleavedRun) -> None:
    world.driver.close()
    world.closed = True


def each_schedule(
    preemptions: int, patch: pytest.MonkeyPatch, make: Callable[[Explorer], InterleavedRun], *programs: list
) -> list[InterleavedRun]:
    """All runs. Run each schedule; ``programs`` are the first actions of the loop's thread, and those of the
    other threads.
    """
    worlds = []
    with Explorer(len(programs)) as explorer:
        for _ in explorer.schedules(preemptions):
            world = make(explorer)
            world.make(patch)

            def run(actor: int, world: InterleavedRun = world) -> None:
                for act in programs[actor]:
                    world.point()
                    act(world)
                if actor == LOOP:
                    world.begun = True
                    world.loop.run()

            works = [lambda actor=i: run(actor) for i in range(len(programs))]
            world.begun = not programs[LOOP]
            explorer.run(works, {LOOP: lambda world=world: not world.begun or world.loop.has_work()})
            worlds.append(world)
    return worlds


def test_two_threads_lose_no_event_and_never_enter_the_core_at_once(monkeypatch):
    def make(explorer: Explorer) -> InterleavedRun:
        return InterleavedRun(explorer, {"a": ["a1", "a2"], "b": ["b1"]})

    worlds = each_schedule(3, monkeypatch, make, [], [feed("a")], [feed("b")])
    for world in worlds:
        world.check_all([["a"], ["b"]])
    assert {tuple(x for x in world.heard if x != TICK) for world in worlds} == {("a", "b"), ("b", "a")}
    helped = [w for w in worlds if {who for effect, who in w.performed if effect in ("a1", "a2")} == {B}]
    assert helped, "no schedule lets a thread do another one's work"


def test_effects_of_the_loops_thread_stay_there_and_nothing_overtakes_them(monkeypatch):
    """In this test a list is an effect for the event loop's thread alone. One effect feeds an event
    itself.
    """

    def make(explorer: Explorer) -> InterleavedRun:
        orders = {"a": ["a1", ("a2",), "a3"], "b": [("b1",)], "c": ["c1"]}
        return InterleavedRun(explorer, orders, feeds={("b1",): "c"})

    worlds = each_schedule(2, monkeypatch, make, [], [feed("a")], [feed("b")])
    for world in worlds:
        world.check_all([["a"], ["b"], ["c"]])


def test_the_loops_thread_feeds_too(monkeypatch):
    def make(explorer: Explorer) -> InterleavedRun:
        return InterleavedRun(explorer, {"a": ["a1"], "a'": [("a2",)], "b": [("b1",)], "l": [("l1",)]})

    programs = [feed("l")], [feed("a"), feed("a'")], [feed("b")]
    for world in each_schedule(2, monkeypatch, make, *programs):
        world.check_all([["a", "a'"], ["b"], ["l"]])


@pytest.mark.parametrize("raises", ["a", "b"])
def test_a_core_that_raises_ends_the_driver_and_is_reported_once(monkeypatch, raises):
    def make(explorer: Explorer) -> InterleavedRun:
        return InterleavedRun(explorer, {"a": ["a1", ("a2",)], "b": [("b1",)]}, raises=raises)

    for world in each_schedule(2, monkeypatch, make, [], [feed("a"), feed("a'")], [feed("b")]):
        assert [str(error) for error in world.crashes] == [raises]
        assert not world.faults
        assert raises in world.heard and world.heard[-1] == raises, "the core is asked after its defect"
        assert world.loop.timers == [] or all(t.is_cancelled for t in world.loop.timers)
        world.driver.feed("later")
        assert world.heard[-1] == raises


def test_close_during_a_turn_ends_it_and_is_no_defect(monkeypatch):
    """A thread may have taken one event already. All other events, and all later events, are dropped."""

    def make(explorer: Explorer) -> InterleavedRun:
        return InterleavedRun(explorer, {"a": ["a1", ("a2",)], "a'": ["a3"], "b": ["b1"]})

    ends = set()
    for world in each_schedule(2, monkeypatch, make, [close], [feed("a"), feed("a'")], [feed("b")]):
        assert world.crashes == [] and not world.faults
        assert len(world.late) <= 1 and TICK not in world.late
        assert [effect for effect, _ in world.performed] == world.ordered, "a turn's effects belong together"
        before = list(world.heard)
        world.driver.feed("later")
        assert world.heard == before and all(t.is_cancelled for t in world.loop.timers)
        ends.add(len(before))
    assert ends >= {0, 1, 2}
