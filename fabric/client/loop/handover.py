"""Hands a committed gradient over to the user's update code: ``.grad``, buffers and random generators."""

import logging
from collections.abc import Iterable
from functools import partial

import torch

from fabric.client.control.engine import EngineParts
from fabric.client.data.randomness import UpdateRandomness
from fabric.client.gradients.stale_gradients import StaleGradients
from fabric.client.loop.local_state import LocalState
from fabric.protocol.messages import member_events as io

_log = logging.getLogger("fabric")


class Handover:
    """Begins the update of a step equally on all members; only the main thread uses it."""

    def __init__(self, replica: str, parts: EngineParts, state: LocalState) -> None:
        self._parts = parts
        self._state = state
        self._empty = EmptySteps(replica, state.describer.objects.values())
        optimizers = optimizers_in(state.describer.objects.values())
        self.randomness = UpdateRandomness(optimizers)
        self.stale = StaleGradients(optimizers)
        self.attributes = parts.buffers.attributes

    def give(self, order: io.Apply, held: io.PreparedRound) -> bool:
        """Put the committed gradient into ``.grad``. Return whether the step has no update instead."""
        parts, skipped = self._parts, self._empty.has_no_update(held) or bool(held.nonfinite)
        if skipped:
            # Optimizers do not change a parameter without a gradient, so the user's loop needs no branch.
            self._state.drop_gradient()
        else:
            self._state.run(partial(self._scatter, order, held.weight))
            if held.weight:
                parts.buffers.commit(held.weight)
                parts.own_states.commit(held.weight)
            else:
                parts.buffers.drop()
                parts.own_states.drop()
        if not order.contributed:
            self.stale.end()
            parts.own_states.hand_over()
        self.randomness.begin(order.step)
        return skipped

    def resume(self, step: int) -> None:
        """Begin the update of ``step`` again: the loop of a framework has computed a forward since ``give``.

        Its changes to buffers and its random numbers are not those of the other members.
        """
        self._parts.buffers.drop()
        self.randomness.begin(step)

    def _scatter(self, order: io.Apply, weight: float) -> None:
        backend, gradients = self._parts.backend, self._state.gradients
        weight = weight or 1.0  # weight 0: the sum is zero, so any divisor will do
        if order.prepared is not None and self._parts.exchange.stays(order.step):
            gradients.divide(weight)
        elif order.prepared is not None:
            slot = self._parts.slots.find(order.step)
            backend.scatter(gradients, slot.buffer, weight, slot.absent)
        else:
            fetched = self._parts.fetch_thread.buffer
            assert fetched is not None
            backend.scatter(gradients, fetched, weight)


def optimizers_in(objects: Iterable[object]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the shared state."""
    return [x for x in objects if isinstance(x, torch.optim.Optimizer)]


class EmptySteps:
    """Steps of total weight 0: no member had data for them, or the data were drawn for a past step.

    Such a step is committed, so that the data position advances. It has no update, and the log reports it.
    ``objects`` are the shared state. A scaler among them fails on a step without gradients.
    """

    def __init__(self, replica: str, objects: Iterable[object]) -> None:
        self._replica = replica
        self._scales = any(isinstance(x, torch.amp.GradScaler) for x in objects)
        self._met = 0

    def has_no_update(self, held: io.PreparedRound) -> bool:
        """Return whether this step is empty, so every ``.grad`` must be None. All members return the same.

        Log the first such step, and again each time their number has doubled.
        """
        if held.weight > 0:
            return False
        self._met += 1
        if self._met & (self._met - 1) == 0:
            _log.warning(
                "%s: step %d was committed with total weight 0, as no member had data: %s (%d so far)",
                self._replica,
                held.step,
                "its gradient is zero" if self._scales else "it has no update",
                self._met,
            )
        return not self._scales
