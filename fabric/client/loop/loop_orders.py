"""The member core's orders to the main thread: most are obeyed here, some concern the user's loop."""

from collections.abc import Callable
from typing import NoReturn

from fabric.client.control.engine import Engine
from fabric.client.loop.local_state import LocalState
from fabric.client.loop.loop_progress import LoopProgress
from fabric.client.loop.replay import Replay
from fabric.client.loop.shutdown import Shutdown
from fabric.client.process.error_text import name_samples
from fabric.client.process.step_clock import StepClock
from fabric.client.process.wait_log import WaitLogger
from fabric.errors import RoundsFailed
from fabric.protocol.messages import member_events as io

# The orders that concern the user's loop.
LoopOrder = io.Compute | io.Apply | io.Finish


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
        self._engine = engine
        self._state = state
        self._replay = replay
        self._shutdown = shutdown
        self._progress = progress
        self._clock = clock
        self._wait_logger = wait_logger
        self._rank = rank

    def answer(self, event: io.Event) -> LoopOrder:
        """Post ``event``, and return the next order that concerns the user's loop."""
        self._engine.post(event)
        return self.next()

    def next(self) -> LoopOrder:
        """Wait for an order that concerns the user's loop; obey all orders before it."""
        if self._progress.left is not None:
            raise self._progress.left
        self._wait_logger.begin()
        while True:
            order = self._wait_logger.get(self._engine.orders)
            self._clock.wait_s += self._clock.lap()
            if (for_loop := self._take(order)) is not None:
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

    def _take(self, order: io.Effect | RoundsFailed) -> LoopOrder | None:
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

    def _obey(self, order: io.Effect | RoundsFailed) -> None:
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
            self._state.snapshot(generation)
        elif isinstance(order, io.Install):
            self._replay.install(order)
