"""The driver: order, no re-entry, one timer, and an end that is final."""

import asyncio
from dataclasses import dataclass, field

from fabric.runtime.driver import Driver

TICK = "tick"


@dataclass
class Script:
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_effects_are_performed_in_order_and_events_fed_meanwhile_wait():
    core = Script({"a": ["one", "two"], "b": ["three"]})
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
    core = Script(deadlines=[loop.time() + 0.02, None])
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
    """One timer. It stays where the deadline moves away, and then finds that nothing is due."""
    clock = Clock()
    ticked = asyncio.Event()
    core = Script({TICK: ["ticked"]}, deadlines=[0.01, 1000.0, 0.02])
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
    """The driver's timers that are still to fire."""
    scheduled = asyncio.get_running_loop()._scheduled
    return [t for t in scheduled if not t.cancelled() and "_on_timer" in repr(t)]


async def test_a_deadline_in_the_past_ticks_at_once():
    clock = Clock()
    clock.now = 50.0
    ticked = asyncio.Event()
    core = Script({TICK: ["ticked"]}, deadlines=[10.0, None])
    driver = Driver(core, lambda effect: ticked.set(), tick=TICK, on_crash=lambda error: None, clock=clock)
    driver.feed("a")
    await asyncio.wait_for(ticked.wait(), 10)
    assert core.heard == ["a", TICK]


async def test_a_defect_is_reported_once_and_is_the_end():
    crashes = []
    core = Script({"bad": ["raise"], "ok": ["effect"]}, deadlines=[0.0] * 9)
    performed = []
    driver = Driver(core, performed.append, tick=TICK, on_crash=crashes.append)
    driver.feed("bad")
    driver.feed("ok")
    assert [str(error) for error in crashes] == ["bad"]
    assert performed == [] and core.heard == ["bad"] and timers() == []


async def test_a_defect_in_performing_or_in_the_deadline_counts_too():
    crashes = []

    def perform(effect: str) -> None:
        raise ValueError(effect)

    Driver(Script({"a": ["one", "two"]}), perform, tick=TICK, on_crash=crashes.append).feed("a")
    core = Script()
    core.next_deadline = lambda: 1 / 0
    Driver(core, perform, tick=TICK, on_crash=crashes.append).feed("a")
    assert [type(error) for error in crashes] == [ValueError, ZeroDivisionError]


async def test_nothing_happens_after_close():
    core = Script({"a": ["one", "two"], "b": ["three"]}, deadlines=[0.0])
    performed = []

    def perform(effect: str) -> None:
        performed.append(effect)
        driver.feed("b")
        driver.close()

    driver = Driver(core, perform, tick=TICK, on_crash=lambda error: None)
    driver.feed("a")
    driver.feed("c")
    # What the core has ordered in one answer belongs together; nothing is fed after it.
    assert performed == ["one", "two"] and core.heard == ["a"] and timers() == []
