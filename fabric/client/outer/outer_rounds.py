"""The rounds of outer steps: opened, handed over, and committed, in a job or alone."""

import sys
from typing import Protocol

import torch

from fabric.client.loop.session import Session
from fabric.client.loop.solo import SoloSession, SoloStep
from fabric.client.loop.step import Step
from fabric.client.outer.global_parameters import GlobalParameters
from fabric.client.outer.outer_schedule import OuterSchedule
from fabric.protocol.messages import member_events as io


class OuterRounds(Protocol):
    """The rounds of outer steps, as the inner steps use them."""

    is_open: bool  # whether this replica may contribute to the round of the committed step

    def open(self) -> bool:
        """Begin the next outer step. Return whether the local parameters were replaced."""

    def hand_over(self) -> None:
        """Contribute the pseudo-gradient; never wait."""

    def poll(self) -> bool:
        """Do what the exchange under way needs; never wait. Return whether this replica fell behind."""

    def commit(self) -> Step | SoloStep:
        """Wait for the round's commit, and apply it."""


class _Updates:
    """Applies committed pseudo-gradients."""

    def __init__(
        self, shared: GlobalParameters, outer: torch.optim.Optimizer, schedule: OuterSchedule
    ) -> None:
        self._shared, self._outer, self._schedule = shared, outer, schedule

    def hand_over(self, step: int) -> None:
        self._shared.set_gradient(step % self._schedule.fragments)

    def apply(self, step: Step | SoloStep) -> None:
        """Update the global parameters of the step's fragment, and then the local ones.

        If the step has nothing of this replica, the local parameters begin from the global ones.
        """
        fragment = step.number % self._schedule.fragments
        self._shared.keep_gradient(fragment)
        self._outer.step()
        self._outer.zero_grad(set_to_none=True)
        if step.contributed:
            self._shared.load(fragment, self._schedule.alpha)
        else:
            self._shared.load()


class JobRounds:
    """The rounds of a job: ``session`` joins the job at the first ``open``."""

    def __init__(
        self,
        session: Session,
        shared: GlobalParameters,
        outer: torch.optim.Optimizer,
        schedule: OuterSchedule,
        until: int = sys.maxsize,
    ) -> None:
        self.is_open = False
        self._session = session
        self._shared = shared
        self._updates = _Updates(shared, outer, schedule)
        self._until = until
        self._order: io.Compute | None = None
        self._arrived: io.Apply | io.Finish | None = None
        self._loads = 0  # the session's loads when the pseudo-gradient was handed over
        self._weight = 0.0
        session.start_exchanges(schedule.describe(), until)

    def open(self) -> bool:
        session = self._session
        loads, replayed = session.loads, 0
        while session.committed_step < self._until:
            order = session.reach_boundary()
            if isinstance(order, io.Compute):
                self._order, self.is_open = order, True
                break
            if isinstance(order, io.Finish) and session.committed_step >= self._until:
                break  # the state that was loaded on the way is the final one
            self._updates.apply(session.end_step(order))
            replayed += 1
        if session.loads != loads:
            self._shared.load()
        return replayed > 0 or session.loads != loads

    def hand_over(self) -> None:
        assert self._order is not None
        session, order = self._session, self._order
        self._loads, self._weight = session.loads, 1.0 if session.take_drawn() else 0.0
        self._updates.hand_over(order.step)
        session.contribute(order, self._weight)
        self.is_open = False
        self.poll()

    def poll(self) -> bool:
        if self._arrived is None and (order := self._session.orders.poll()) is not None:
            self._note(order)
        return isinstance(self._arrived, io.Apply) and self._arrived.prepared is None

    def commit(self) -> Step:
        while self._arrived is None:
            self._note(self._session.orders.next())
        step = self._session.end_step(self._arrived)
        self._arrived = None
        self._updates.apply(step)
        if step.replayed:
            self.open()
        return step

    def _note(self, order: io.Compute | io.Apply | io.Finish) -> None:
        if not isinstance(order, io.Compute):
            self._arrived = order
            return
        # The round was redone. The kept gradient counts already, a dropped one is handed over again, unless
        # a loaded state has replaced the global parameters.
        assert self._order is not None
        dropped = not self._shared.has_gradient
        same = order.step == self._order.step and self._session.loads == self._loads
        if dropped and same:
            self._updates.hand_over(order.step)
        self._session.contribute(order, self._weight if dropped and same else 0.0)


class SoloRounds:
    """As JobRounds with FABRIC_DISABLE=1: this process's pseudo-gradient is the average."""

    is_open = True

    def __init__(
        self,
        session: SoloSession,
        shared: GlobalParameters,
        outer: torch.optim.Optimizer,
        schedule: OuterSchedule,
    ) -> None:
        self._session, self._updates = session, _Updates(shared, outer, schedule)

    def open(self) -> bool:
        return False

    def hand_over(self) -> None:
        self._updates.hand_over(self._session.committed_step)

    def poll(self) -> bool:
        return False

    def commit(self) -> SoloStep:
        step = self._session.exchange()
        self._updates.apply(step)
        return step
