"""One step as the user's loop sees it: micro-batches to compute, then the averaged gradient."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fabric.errors import FabricError
from fabric.health.work import WorkAmount

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
        self._session = session
        self._samples = 0
        self._weight = 0.0
        self._work: WorkAmount | None = None  # declared work of the micro-batch under way

    def __iter__(self) -> Iterator[Any]:
        if self.done:
            raise FabricError(f"step {self.number} is committed already: iterate each step once")
        return self._session.run_step(self)

    def begin(self, samples: int) -> None:
        """Note that the user's loop gets a micro-batch of ``samples`` samples."""
        self._samples, self._work = samples, None

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, work: float | Iterable[float] | None = None
    ) -> None:
        """Add this micro-batch's gradient: ``loss.backward()`` scaled by ``weight``.

        ``loss`` is a mean over the micro-batch. ``weight``: the number of samples (the default) or tokens
        that the mean is over. ``work`` predicts the micro-batch's time, so that a long micro-batch does not
        make the replica look slow: the lengths of its packed documents, or a number (default: samples).
        """
        share = self.add_weight(weight, work)
        with self._session.overlap.backward(self.number, self._weight):
            (loss * share).backward()  # type: ignore[no-untyped-call]

    def add_weight(self, weight: float | None = None, work: float | Iterable[float] | None = None) -> float:
        """Count a gradient that other code (such as a pipeline schedule) has added; return its weight.

        The gradient must be scaled by ``weight`` (default: the micro-batch's number of samples). ``work``: as
        for ``backward``.
        """
        if work is not None:
            self._work = _amount(work, self._samples)
        share = float(self._samples if weight is None else weight)
        if not share > 0:
            raise FabricError(f"the weight of a micro-batch must be above 0, not {share:g}")
        self._weight += share
        return share

    def take_work(self, samples: int) -> WorkAmount:
        """Return the work of the micro-batch that has just ended: the declared work, else its ``samples``."""
        declared, self._work = self._work, None
        return declared or WorkAmount(float(samples), 0.0, float(samples))

    def take_weight(self) -> float:
        """Return the weight added since the last call."""
        weight, self._weight = self._weight, 0.0
        return weight


def _amount(work: float | Iterable[float], samples: int) -> WorkAmount:
    """Convert declared work, which is the lengths of documents or one number. Raises FabricError."""
    if isinstance(work, Iterable) and getattr(work, "ndim", None) != 0:
        amount = WorkAmount.of_documents([float(length) for length in work], float(samples))
    else:
        amount = WorkAmount(float(work), 0.0, float(samples))  # type: ignore[arg-type]
    if not amount.is_valid:
        raise FabricError(
            "the work of a micro-batch is negative or no number: give its documents' lengths, or a count"
        )
    return amount
