"""The driver: order, no re-entry, one timer, and an end that is final."""

import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest

from fabric.runtime.driver import Driver

TICK = "tick"


@dataclass
class ScriptedCore:
    """A core that answers from a table, records what it heard, and names deadlines as told."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    deadlines: list[float | None] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    inside: bool = False
    deadline: float | None = None

    def handle(self, event: str, now: float) -> list[str]:
        assert not self.inside, "the core was entered twice"
        self.inside = True
        self.heard.append(event)
        self.deadline = self.deadlines.pop(0) if self.deadlines else None
        effects = self.answers.get(event, [])
        self.inside = False
        if "raise" in effects:
            raise RuntimeError(event)
        return effects

    def next_deadline(self) -> float | None:
        return self.deadline


class DriverClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_effects_are_performed_in_order_and_events_fed_meanwhile_wait():
    core = ScriptedCore({"a": ["one", "two"], "b": ["three"]})
    performed = []

    def perform(effect: str) -> None:
        performed.append((effect, list(core.heard)))
        if effect == "one":
            driver.feed("b")

    driver = Driver(core, perform, tick=TICK, on_crash=lambda error: None)
    driver.feed("a")
    assert performed == [("one", ["a"]), ("two", ["a"]), ("three", ["a", "b"])]


async def test_the_core_is_called_at_its_deadline():
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    core = ScriptedCore(deadlines=[loop.time() + 0.02, None])
    handle = core.handle

    def listen(event: str, now: float) -> list[str]:
        if event == TICK:
            assert now >= first
            heard.set()
        return handle(event, now)

    core.handle = listen
    first = core.deadlines[0]
    driver = Driver(core, lambda effect: None, tick=TICK, on_crash=lambda error: None, clock=loop.time)
    driver.feed("a")
    await asyncio.wait_for(heard.wait(), 10)
    assert core.heard == ["a", TICK]


async def test_the_deadline_that_was_named_last_is_the_one_that_counts():
    """One timer. The timer stays when the deadline moves away, and then finds no due deadline."""
    clock = DriverClock()
    ticked = asyncio.Event()
    core = ScriptedCore({TICK: ["ticked"]}, deadlines=[0.01, 1000.0, 0.02])
    driver = Driver(core, lambda effect: ticked.set(), tick=TICK, on_crash=lambda error: None, clock=clock)
    driver.feed("a")
    driver.feed("b")
    (kept,) = timers()
    while timers() in ([kept], []):  # noqa: ASYNC110  (nothing announces a timer)
        await asyncio.sleep(0)
    (far,) = timers()
    assert far.when() > asyncio.get_running_loop().time() + 100 and core.heard == ["a", "b"]
    clock.now = 1.0
    driver.feed("c")
    await asyncio.wait_for(ticked.wait(), 10)
    assert core.heard == ["a", "b", "c", TICK] and timers() == []


def timers() -> list[asyncio.TimerHandle]:
    """Return the driver's timers that have not fired."""
    scheduled = asyncio.get_running_loop()._scheduled
    return [t for t in scheduled if not t.cancelled() and "_on_timer" in repr(t)]


async def test_a_deadline_in_the_past_ticks_at_once():
    clock = DriverClock()
    clock.now = 50.0
    ticked = asyncio.Event()
    core = ScriptedCore({TICK: ["ticked"]}, deadlines=[10.0, None])
    driver = Driver(core, lambda effect: ticked.set(), tick=TICK, on_crash=lambda error: None, clock=clock)
    driver.feed("a")
    await asyncio.wait_for(ticked.wait(), 10)
    assert core.heard == ["a", TICK]


async def test_an_exception_in_a_core_is_reported_once_and_ends_the_driver():
    crashes = []
    core = ScriptedCore({"bad": ["raise"], "ok": ["effect"]}, deadlines=[0.0] * 9)
    performed = []
    driver = Driver(core, performed.append, tick=TICK, on_crash=crashes.append)
    driver.feed("bad")
    driver.feed("ok")
    assert [str(error) for error in crashes] == ["bad"]
    assert performed == [] and core.heard == ["bad"] and timers() == []


async def test_an_exception_in_performing_or_in_the_deadline_ends_the_driver_too():
    crashes = []

    def perform(effect: str) -> None:
        raise ValueError(effect)

    Driver(ScriptedCore({"a": ["one", "two"]}), perform, tick=TICK, on_crash=crashes.append).feed("a")
    core = ScriptedCore()
    core.next_deadline = lambda: 1 / 0
    Driver(core, perform, tick=TICK, on_crash=crashes.append).feed("a")
    assert [type(error) for error in crashes] == [ValueError, ZeroDivisionError]


async def test_a_closed_driver_performs_no_effect():
    core = ScriptedCore({"a": ["one", "two"], "b": ["three"]}, deadlines=[0.0])
    performed = []

    def perform(effect: str) -> None:
        performed.append(effect)
        driver.feed("b")
        driver.close()

    driver = Driver(core, perform, tick=TICK, on_crash=lambda error: None)
    driver.feed("a")
    driver.feed("c")
    # The driver performs the effects of one event together, and feeds no event after the close.
    assert performed == ["one", "two"] and core.heard == ["a"] and timers() == []


@dataclass
class Numbers:
    """A core that orders one effect of each kind per event, and names the thread that it runs in."""

    handled: list[tuple[int, int]] = field(default_factory=list)
    inside: bool = False
    due: float | None = None

    def handle(self, event: tuple[int, int], now: float) -> list[object]:
        assert not self.inside, "the core was entered twice"
        self.inside = True
        if event != TICK:
            self.handled.append(event)
        self.inside = False
        if event == TICK:
            self.due = None
            return [TICK]
        return [("here", event), ["loop", event], ("again", event)]

    def next_deadline(self) -> float | None:
        return self.due


async def run_in_threads(*works) -> None:
    """Run all functions in threads at once, to their end."""
    start = threading.Barrier(len(works))

    def run(work) -> None:
        start.wait()
        work()

    await asyncio.gather(*(asyncio.to_thread(run, work) for work in works))


async def test_threads_feed_at_once_and_effects_are_performed_in_the_order_of_the_events():
    """Effects of type tuple anywhere, lists in the loop's thread alone, and nothing overtakes anything."""
    core, performed, loops_own = Numbers(), [], threading.get_ident()
    everything, count = asyncio.Event(), 200

    def perform(effect) -> None:
        performed.append((effect[0], effect[1]))
        assert isinstance(effect, tuple) or threading.get_ident() == loops_own
        if len(performed) == 3 * 3 * count:
            loop.call_soon_threadsafe(everything.set)

    loop, crashes = asyncio.get_running_loop(), []
    driver = Driver(
        core, perform, tick=TICK, on_crash=crashes.append, thread_safe_effects=frozenset((tuple,))
    )
    await run_in_threads(*(lambda n=n: [driver.feed((n, i)) for i in range(count)] for n in range(3)))
    await asyncio.wait_for(everything.wait(), 30)
    assert not crashes
    assert performed == [(kind, event) for event in core.handled for kind in ("here", "loop", "again")]
    for n in range(3):
        assert [i for who, i in core.handled if who == n] == list(range(count))


async def test_effects_of_a_step_are_performed_by_the_thread_with_the_event():
    ran = []
    core = ScriptedCore({"a": ["one", "two"]})
    driver = Driver(
        core,
        lambda effect: ran.append((effect, threading.get_ident())),
        tick=TICK,
        on_crash=lambda error: None,
        thread_safe_effects=frozenset((str,)),
    )
    who = await asyncio.to_thread(lambda: (driver.feed("a"), threading.get_ident())[1])
    assert ran == [("one", who), ("two", who)]
    driver.feed("a")
    assert ran[2:] == [("one", threading.get_ident()), ("two", threading.get_ident())]


async def test_a_deadline_that_another_thread_brought_about_is_kept():
    ticked = asyncio.Event()
    core = Numbers(due=time.monotonic() + 0.01)
    driver = Driver(
        core,
        lambda effect: ticked.set() if effect == TICK else None,
        tick=TICK,
        on_crash=lambda error: None,
        thread_safe_effects=frozenset((tuple, list)),
    )
    await asyncio.to_thread(driver.feed, (0, 0))
    await asyncio.wait_for(ticked.wait(), 30)
    assert timers() == []


@pytest.mark.parametrize("struck", ["in the core", "in an effect", "as the turn is passed on"])
async def test_an_interrupt_of_a_thread_ends_the_driver_and_reaches_the_thread(struck):
    """Ctrl-C may interrupt the main thread anywhere: the driver closes, reports this once, and passes the
    interrupt on.
    """
    crashes, caught, performed = [], [], []
    core = ScriptedCore({"a": ["one", "two"]})

    def perform(effect: str) -> None:
        performed.append(effect)
        if struck == "in an effect":
            raise KeyboardInterrupt

    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    thread_safe_effects = frozenset(() if struck == "as the turn is passed on" else (str,))
    driver = Driver(
        core, perform, tick=TICK, on_crash=crashes.append, thread_safe_effects=thread_safe_effects
    )
    if struck == "in the core":
        core.handle = interrupted
    passed_on = driver._go_on

    def feed() -> None:
        if struck == "as the turn is passed on":
            on_loop = driver._on_loop
            driver._on_loop = lambda work: (on_loop(work), interrupted() if work == passed_on else None)
        try:
            driver.feed("a")
        except KeyboardInterrupt as error:
            caught.append(error)

    await asyncio.to_thread(feed)
    await asyncio.sleep(0)
    driver.feed("a")
    assert caught == crashes and len(caught) == 1
    # When the turn is passed on, the event loop may have handled the event first.
    most = {"in the core": 0, "in an effect": 1, "as the turn is passed on": 2}[struck]
    assert performed == ["one", "two"][: len(performed)] and len(performed) <= most


async def test_the_cores_clock_goes_on_while_the_machine_is_suspended():
    """If a suspended member did not count the time, it would take more autonomy than the lighthouse
    allows.
    """
    clock = Driver.__init__.__kwdefaults__["clock"]
    assert clock.args == (time.CLOCK_BOOTTIME,) and clock.func is time.clock_gettime
    begun, heard = clock(), []
    core = ScriptedCore()
    handle = core.handle
    core.handle = lambda event, now: heard.append(now) or handle(event, now)
    driver = Driver(core, lambda effect: None, tick=TICK, on_crash=pytest.fail)
    driver.feed("a")
    driver.close()
    assert len(heard) == 1 and begun <= heard[0] <= clock()
