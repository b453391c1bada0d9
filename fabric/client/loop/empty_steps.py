"""Steps of total weight 0: no member had data for them, or the data were drawn for a past step.

Such a step is committed, so that the data position advances. It has no update, and the log reports it.
"""

import logging
from collections.abc import Iterable

import torch

from fabric.protocol.messages.member_events import PreparedRound

_log = logging.getLogger("fabric")


class EmptySteps:
    """``objects`` are the shared state. A scaler among them fails on a step without gradients."""

    def __init__(self, replica: str, objects: Iterable[object]) -> None:
        self._replica = replica
        self._scales = any(isinstance(x, torch.amp.GradScaler) for x in objects)
        self._met = 0

    def has_no_update(self, held: PreparedRound) -> bool:
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
