"""The member core's orders to the main thread: most are obeyed here, some concern the user's loop."""

from collections.abc import Callable
from typing import NoReturn, assert_never

from fabric.client.control.engine import Engine, MainThreadOrder
from fabric.client.loop.local_state import LocalState
from fabric.client.loop.loop_progress import LoopProgress
from fabric.client.loop.replay import Replay
from fabric.client.loop.shutdown import Shutdown
from fabric.client.process.error_text import name_samples
from fabric.client.process.step_clock import StepClock
from fabric.client.process.wait_log import WaitLogger
from fabric.errors import RoundsFailed
from fabric.exit_codes import RESTART
from fabric.protocol.messages import member_events as io

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

    def answer(self, event: io.Event) -> LoopOrder:
        """Post ``event``, and return the next order that concerns the user's loop."""
        self._engine.post(event)
        return self.next()

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
