"""One step as the user's loop sees it: micro-batches to compute, until the averaged gradient is there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fabric.errors import FabricError

if TYPE_CHECKING:
    from fabric.client.loop.session import Session


class Step:
    """Iterate it to get micro-batches; when the iteration ends, ``.grad`` is the average over the job.

    The fields have their final values when the iteration has ended.
    """

    def __init__(self, session: "Session", number: int) -> None:
        self.number = number  # the committed step that this one leads from; a recovery may move it on
        self.contributed = False  # this replica put something in: false in a replay and in a first step
        self.skipped = False  # the step has no update: every ``.grad`` is None
        self.metrics: dict[str, float] = {}  # sums over the whole global batch
        self.done = False
        self._session = session
        self._samples = 0
        self._weight = 0.0

    def __iter__(self) -> Iterator[Any]:
        if self.done:
            raise FabricError(f"step {self.number} is committed already: iterate each step once")
        return self._session.run_step(self)

    def begin(self, samples: int) -> None:
        """Note that the user's loop gets a micro-batch of ``samples`` samples."""
        self._samples = samples

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradient: ``loss.backward()`` scaled by ``weight``.

        ``loss`` is a mean over the micro-batch. ``weight``: the number of samples (the default) or tokens
        that the mean is over.
        """
        share = self.add_weight(weight)
        with self._session.overlap.backward(self.number, self._weight):
            (loss * share).backward()  # type: ignore[no-untyped-call]

    def add_weight(self, weight: float | None = None) -> float:
        """Count a gradient that other code has added, such as a pipeline schedule; return its weight.

        The gradient must be scaled by ``weight`` (default: the micro-batch's number of samples).
        """
        share = float(self._samples if weight is None else weight)
        if not share > 0:
            raise FabricError(f"the weight of a micro-batch must be above 0, not {share:g}")
        self._weight += share
        return share

    def take_weight(self) -> float:
        """Return the weight added since the last call."""
        weight, self._weight = self._weight, 0.0
        return weight
