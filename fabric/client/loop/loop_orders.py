"""The member core's orders to the main thread: most are obeyed here, some concern the user's loop."""

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, assert_never

from fabric.client.control.engine import Engine, MainThreadOrder
from fabric.client.loop.local_state import LocalState, LoopProgress
from fabric.client.loop.replay import Replay
from fabric.client.loop.shutdown import Shutdown, name_samples
from fabric.client.process.step_clock import StepClock
from fabric.errors import RoundsFailed
from fabric.exit_codes import RESTART
from fabric.protocol.messages import member_events as io

log = logging.getLogger(__name__)

# A wait longer than this gets a line in the log. Its second line follows after a minute, its third after two.
FIRST_S = 5.0
AGAIN_S, LIMIT_S = 60.0, 600.0
_LONGEST_S = 3600.0  # longest wait for the queue in one call, which takes no infinite timeout

T = TypeVar("T")


class WaitLogger:
    """Waits for orders, and logs at growing intervals for what: ``describe`` says that, or is empty."""

    def __init__(self, replica: str, describe: Callable[[], str], first_s: float = FIRST_S) -> None:
        self._replica = replica
        self._describe = describe
        self._first_s = first_s
        self._again_s = AGAIN_S
        self._begun = 0.0  # the time when the wait began, monotonic seconds
        self._logged_at = -math.inf

    def begin(self) -> None:
        """Start a wait. Orders may come that do not end it."""
        self._begun = time.monotonic()

    def get(self, orders: "queue.SimpleQueue[T]") -> T:
        """Return the next order as soon as there is one."""
        due = max(self._begun + self._first_s, self._logged_at + self._again_s)
        while True:
            try:
                return orders.get(timeout=min(max(0.0, due - time.monotonic()), _LONGEST_S))
            except queue.Empty:
                if time.monotonic() >= due:
                    due = self._say(time.monotonic())

    def _say(self, now: float) -> float:
        """Log what the replica waits for, if known; return when to call this again."""
        what = self._describe()
        if not what:
            return now + self._first_s
        lasts = now - self._logged_at <= 2 * self._again_s
        self._again_s = min(2 * self._again_s, LIMIT_S) if lasts else AGAIN_S
        self._logged_at = now
        log.warning("fabric: %s has waited %.0f s: for %s", self._replica, now - self._begun, what)
        return now + self._again_s


def describe_wait(status: Mapping[str, Any], reason: str) -> str:
    """Return what a trainer waits for; empty while ``LighthouseLink`` reports that no lighthouse answers.

    ``status``: from ``Engine.describe``. ``reason``: what the job waits for, by the lighthouse.
    """
    lighthouse, round_ = status["lighthouse"], status.get("round")
    if lighthouse["connected"] and reason:
        return reason
    if status["newest_epoch"] == 0:
        return ""
    if status.get("catching_up") in ("state", "gradient"):
        wanted, step = status["catching_up"], status["step"]
        return f"the {wanted} of step {step} and on, from the others' checkpoint servers"
    if round_ is not None and round_["missing"]:
        return f"{', '.join(round_['missing'])} in step {round_['step']}"
    if not lighthouse["connected"]:
        return f"the lighthouse at {lighthouse['url']}, which is out of reach"
    return "the others"


# The orders that concern the user's loop.
LoopOrder = io.Compute | io.Apply | io.Finish
Order = MainThreadOrder | io.StartExchange | RoundsFailed


class LoopOrders:
    """Takes the orders from ``engine``; only the main thread uses it."""

    def __init__(
        self,
        engine: Engine,
        state: LocalState,
        replay: Replay,
        shutdown: Shutdown,
        progress: LoopProgress,
        clock: StepClock,
        wait_logger: WaitLogger,
        rank: int,
    ) -> None:
        # Returns the samples of a step's micro-batch, where the loop's data have a plan.
        self.samples: Callable[[int, int], list[int]] | None = None
        self.held: io.Install | None = None  # a state to load in a later call of ``session.steps``
        self._engine = engine
        self._state = state
        self._replay = replay
        self._shutdown = shutdown
        self._progress = progress
        self._clock = clock
        self._wait_logger = wait_logger
        self._rank = rank
        self._has_begun = False  # whether this process has said where it begins

    def at_boundary(self, ready: Callable[[], io.Event]) -> LoopOrder | io.Install:
        """Answer with the event of ``ready``, or load the held state; return the next order for the loop.

        A state at or beyond the end of this call of ``session.steps`` is held for a later call, because it
        has the effect of the user's code between the calls already. The order to load it is returned then.
        """
        if self.held is None:
            self._engine.post(ready())
            return self._next(may_hold=True)
        if self.held.step >= self._progress.until:
            return self.poll() or self.held
        self.load_held()
        return self._next(may_hold=True)

    def load_held(self) -> bool:
        """Load the held state now; return whether there was one."""
        held, self.held = self.held, None
        if held is not None:
            self._replay.install(held)
        return held is not None

    def next(self) -> LoopOrder:
        """Wait for an order that concerns the user's loop; obey all orders before it."""
        order = self._next(may_hold=False)
        assert not isinstance(order, io.Install)
        return order

    def _next(self, may_hold: bool) -> LoopOrder | io.Install:
        if self._progress.left is not None:
            raise self._progress.left
        self._wait_logger.begin()
        while True:
            order = self._wait_logger.get(self._engine.orders)
            self._clock.wait_s += self._clock.lap()
            if isinstance(order, io.Install) and self._holds(order, may_hold):
                self.held = order
                return order
            if (for_loop := self._take(order)) is not None:
                if not self._has_begun and not isinstance(for_loop, io.Finish):
                    self._has_begun = True
                    self._shutdown.say_start(for_loop.step)
                return for_loop

    def poll(self) -> LoopOrder | None:
        """As ``next``, but return None instead of waiting."""
        while not self._engine.orders.empty():
            if (for_loop := self._take(self._engine.orders.get())) is not None:
                return for_loop
        return None

    def await_end(self) -> None:
        """Obey orders until the job is over."""
        self._wait_logger.begin()
        while not isinstance(order := self._wait_logger.get(self._engine.orders), io.Finish):
            self._obey(order)
        self._take(order)

    def too_late(self, order: io.Finish) -> NoReturn:
        """End the process: the job ended at a step that this process does not hold."""
        self._shutdown.leave(
            f"the job is complete at step {order.step}, this process held step {self._progress.state_step}: "
            "nothing is left to train, and the final state is with the replicas that finished"
        )

    def _take(self, order: Order) -> LoopOrder | None:
        if isinstance(order, io.Finish):
            self._progress.finished = True
            self._shutdown.note_end(order)
        elif isinstance(order, io.Compute | io.Apply):
            parameters = self._state.gradients.parameters
            self._clock.run_benchmark(order, self._rank, parameters, self._engine.echo)
        else:
            self._obey(order)
            return None
        return order

    def _holds(self, order: io.Install, may_hold: bool) -> bool:
        """Whether this state is for a later call of ``session.steps``. For an earlier one leave the job."""
        begin, until = self._progress.begin, self._progress.until
        if begin < 0 or begin <= order.step < until:
            return False
        if order.step < begin or not may_hold:
            self._shutdown.leave(
                f"the job goes on from step {order.step}, and this session.steps call has the steps from "
                f"{begin} to {until}: this process starts again",
                RESTART,
            )
        return True

    def _obey(self, order: Order) -> None:
        if isinstance(order, RoundsFailed):
            self._progress.left = order
            self._shutdown.depart(str(order))
            raise order
        if isinstance(order, io.Stop):
            poisoned = name_samples(order.poison, self.samples) if self.samples is not None else ""
            self._shutdown.leave(order.reason + poisoned, order.code, order.layout)
        elif isinstance(order, io.StartExchange):
            self._engine.exchange_alone(order)
        elif isinstance(order, io.DropGradient):
            self._state.drop_gradient()
        elif isinstance(order, io.TellDigest):
            self._engine.post(self._state.take_digest(order.step))
        elif isinstance(order, io.TakeSnapshot):
            generation = order.generation if order.generation >= 0 else self._engine.generation
            self._state.snapshot(generation, order.durable)
        elif isinstance(order, io.Install):
            self._replay.install(order)
        elif not isinstance(order, io.Compute | io.Apply | io.Finish):  # the loop that takes these has ended
            assert_never(order)
