"""One step as the user's loop sees it: micro-batches to compute, until the averaged gradient is there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fabric.errors import FabricError

if TYPE_CHECKING:
    from fabric.client.loop.session import Session


class Step:
    """Iterate it to get micro-batches; when the iteration ends, ``.grad`` is the average over the job.

    ``number`` is the committed step this one leads from (after a recovery it may have moved on by the time
    the iteration ends). ``contributed`` is false where this replica contributed nothing: a replayed step, or
    a newcomer's first. ``metrics`` are the sums over the whole global batch, there when the iteration ended.
    ``skipped``: the average was not finite and ``on_nan`` is "skip", so every ``.grad`` is None.
    """

    def __init__(self, session: "Session", number: int) -> None:
        self.number = number
        self.contributed = False
        self.skipped = False
        self.metrics: dict[str, float] = {}
        self.done = False
        self._session = session
        self._samples = 0
        self._weight = 0.0

    def __iter__(self) -> Iterator[Any]:
        if self.done:
            raise FabricError(f"step {self.number} is committed already: iterate each step once")
        return self._session.run_step(self)

    def begin(self, samples: int) -> None:
        """A micro-batch of ``samples`` samples is handed to the user."""
        self._samples = samples

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradient: ``loss.backward()`` scaled by ``weight``.

        ``loss`` is a mean over the micro-batch; ``weight`` is what it stands for (default: its number of
        samples; for a mean over tokens give the number of tokens).
        """
        share = self.add_weight(weight)
        with self._session.overlap.backward(self.number, self._weight):
            (loss * share).backward()  # type: ignore[no-untyped-call]

    def add_weight(self, weight: float | None = None) -> float:
        """Somebody else, such as a pipeline schedule, has added this micro-batch's gradient, scaled by
        ``weight`` (default: its number of samples), which is returned."""
        share = float(self._samples if weight is None else weight)
        if not share > 0:
            raise FabricError(f"the weight of a micro-batch must be above 0, not {share:g}")
        self._weight += share
        return share

    def take_weight(self) -> float:
        """The weight gathered since the last call."""
        weight, self._weight = self._weight, 0.0
        return weight
