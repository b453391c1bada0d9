"""One step as the user's loop sees it: micro-batches to compute, then the averaged gradient."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fabric.client.loop.step_weight import StepWeight
from fabric.errors import FabricError

if TYPE_CHECKING:
    from fabric.client.loop.session import Session


class Step:
    """Iterate it to get micro-batches; when the iteration ends, ``.grad`` is the average over the job.

    The fields have their final values when the iteration has ended.
    """

    def __init__(self, session: "Session", number: int) -> None:
        self.number = number  # the committed step before this step's update; a recovery may raise this number
        self.contributed = False  # this replica's gradient is in the average; false in a replay
        self.replayed = False  # the gradient is a published one, and this replica still catches up
        self.skipped = False  # the step has no update: every ``.grad`` is None
        self.metrics: dict[str, float] = {}  # sums over the whole global batch
        self.done = False
        self.weight = StepWeight()
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        if self.done:
            raise FabricError(f"step {self.number} is committed already: iterate each step once")
        return self._session.run_step(self)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        work: float | Iterable[float] | None = None,
        **options: Any,
    ) -> None:
        """Add this micro-batch's gradient: ``loss.backward()`` scaled by ``weight``.

        ``loss`` is a mean over the micro-batch. ``weight``: the number of samples (the default) or tokens
        that the mean is over; with weight 0 nothing is added. Several losses of one micro-batch may each have
        their call: their gradients are added, and the micro-batch counts once. ``work`` predicts the
        micro-batch's time, so that a long micro-batch does not make the replica look slow: the lengths of its
        packed documents, or a number (default: samples). ``options``: as for ``torch.Tensor.backward``.
        """
        before = self.weight.so_far
        share = self.add_weight(weight, work)
        if not share and self._session.layout.ranks == 1:
            return  # the loss may be 0/0; the ranks of one replica all go through the backward pass
        with self._session.overlap.backward(self.number, self.weight.so_far - before):
            (loss * share).backward(**options)  # type: ignore[no-untyped-call]

    def add_weight(self, weight: float | None = None, work: float | Iterable[float] | None = None) -> float:
        """Count a gradient that other code (such as a pipeline schedule) has added; return its weight.

        The gradient must be scaled by ``weight`` (default: the micro-batch's number of samples). ``work``: as
        for ``backward``.
        """
        return self.weight.add(weight, work)
