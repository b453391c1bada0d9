"""Every interleaving of a few threads at the points that they name, one at a time and in a known order.

An ``Explorer`` runs a scenario again and again, each time with another schedule. The actors are real threads,
of which one runs at any moment. At a point the running actor hands over to the actor that the schedule names.
So nothing depends on the machine: a schedule that fails once fails every time.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Interleaving:
    """A schedule: the choice of the next actor at each point; 0 is the running actor."""

    prefix: list[int]
    preemptions: int  # how often the schedule may stop an actor that could go on
    # the (choice, number of choices) of each decision
    taken: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, count: int, goes_on: bool) -> int:
        if goes_on and self.preemptions == 0:
            count = 1
        position = len(self.taken)
        choice = self.prefix[position] if position < len(self.prefix) else 0
        assert choice < count, "the scenario is not deterministic"
        self.taken.append((choice, count))
        if goes_on and choice:
            self.preemptions -= 1
        return choice

    def next_prefix(self) -> list[int] | None:
        """Return the next schedule in depth-first order; None after the last."""
        choices = list(self.taken)
        while choices:
            choice, count = choices.pop()
            if choice + 1 < count:
                return [x for x, _ in choices] + [choice + 1]
        return None


class Explorer:
    """Runs scenarios on ``actors`` threads, which live as long as the explorer."""

    def __init__(self, actors: int) -> None:
        self._batons = [threading.Lock() for _ in range(actors)]
        for baton in self._batons:
            baton.acquire()
        self._over = threading.Lock()
        self._over.acquire()
        self._works: list[Callable[[], None]] = []
        self._ready: list[Callable[[], bool]] = []
        self._left: list[int] = []
        self._running = 0
        self._ends = False
        self.schedule = Interleaving([], 0)
        self.errors: list[BaseException] = []
        self.idents = [0] * actors
        self._threads = [threading.Thread(target=self._live, args=(i,), daemon=True) for i in range(actors)]
        for number, thread in enumerate(self._threads):
            thread.start()
            self.idents[number] = thread.ident or 0

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        for baton, thread in zip(self._batons, self._threads, strict=True):
            baton.release()
            thread.join()

    @property
    def running(self) -> int:
        """The actor whose turn it is."""
        return self._running

    def schedules(self, preemptions: int) -> Iterator[Interleaving]:
        """Yield all schedules; the caller runs each before it requests the next."""
        prefix: list[int] | None = []
        while prefix is not None:
            self.schedule = Interleaving(prefix, preemptions)
            yield self.schedule
            prefix = self.schedule.next_prefix()

    def run(self, works: list[Callable[[], None]], ready: dict[int, Callable[[], bool]]) -> None:
        """Run all actors to their end. An actor named in ``ready`` has something to do only while that is
        true.
        """
        self._works, self.errors = works, []
        self._ready = [ready.get(i, lambda: True) for i in range(len(works))]
        self._left = list(range(len(works)))
        self._running = -1
        self._hand_on()
        assert self._over.acquire(timeout=60), "an actor waits for something outside of the schedule"
        if self.errors:
            raise self.errors[0]

    def point(self) -> None:
        """Let another actor go on here, if the schedule says so."""
        actor = self._running
        # Do not read which actor runs after the hand-over: the other actor may have handed back already.
        if self._hand_on():
            self._batons[actor].acquire()

    def is_alone(self, actor: int) -> bool:
        """Return whether all other actors have ended."""
        return self._left == [actor]

    def _hand_on(self) -> bool:
        """Choose the next actor; return whether it is another than the running one."""
        actor = self._running
        able = [i for i in self._left if self._ready[i]()]
        goes_on = actor in able
        if goes_on:
            able = [actor, *(i for i in able if i != actor)]
        if not able:
            self._running = -1
            self._over.release()
            return True
        chosen = able[self.schedule.choose(len(able), goes_on)]
        if chosen == actor:
            return False
        self._running = chosen
        self._batons[chosen].release()
        return True

    def _live(self, number: int) -> None:
        while True:
            self._batons[number].acquire()
            if self._ends:
                return
            try:
                self._works[number]()
            except BaseException as error:  # noqa: BLE001  (whatever it is fails the test)
                self.errors.append(error)
            self._left.remove(number)
            self._hand_on()
