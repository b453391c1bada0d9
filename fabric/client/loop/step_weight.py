"""The weight of a step's gradient: each micro-batch counts once, however often backward runs for it."""

import math
from collections.abc import Iterable, Sequence

import torch

from fabric.errors import FabricError
from fabric.health.work import WorkAmount


class StepWeight:
    """Sums the weights of a step's micro-batches, and keeps their declared work."""

    def __init__(self) -> None:
        self.samples = 0  # number of samples of the micro-batch under way
        self._share: float | None = None  # weight of the micro-batch under way; None: not said yet
        self._order = 0.0  # sum of the weights since the last ``take``
        self._before = 0.0  # sum of the weights before that
        self._is_said = False  # whether any micro-batch since then has said its weight
        self._work: WorkAmount | None = None  # declared work of the micro-batch under way

    def begin(self, samples: int) -> None:
        """Begin a micro-batch of ``samples`` samples."""
        self.samples, self._share, self._work = samples, None, None

    def add(self, weight: float | None, work: float | Iterable[float] | None) -> float:
        """Count the micro-batch once, and return its weight. Raises FabricError.

        ``weight`` None: as said before in this micro-batch, else its number of samples.
        """
        if work is not None:
            self._work = _amount(work, self.samples)
        if weight is None:
            share = float(self.samples) if self._share is None else self._share
        else:
            share = float(weight)
        if not 0 <= share < math.inf:
            raise FabricError(f"the weight of a micro-batch must be a number from 0 on, not {share:g}")
        if self._share is None:
            self._share, self._is_said = share, True
            self._order += share
        elif share != self._share:
            raise FabricError(
                f"one micro-batch has the weights {self._share:g} and {share:g}: give all backward passes of "
                "a micro-batch the same weight, for their gradients are added before the weight counts"
            )
        return share

    @property
    def so_far(self) -> float:
        """The sum of the weights since the last ``take``."""
        return self._order

    def take(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """Return the weight since the last call. Raises FabricError for a gradient without any weight."""
        order, has_weight = self._order, self._is_said
        if not has_weight and not self._before and any(_has_gradient(p) for p in parameters):
            raise FabricError(
                "the micro-batches of this step have left a gradient and no weight: call step.backward(loss) "
                "in place of loss.backward(), or step.add_weight() after it"
            )
        self._before += order
        self._order, self._is_said = 0.0, False
        return order

    def take_work(self, samples: int) -> WorkAmount:
        """Return the work of the micro-batch that has just ended: the declared work, else its ``samples``."""
        declared, self._work = self._work, None
        return declared or WorkAmount(float(samples), 0.0, float(samples))


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool((parameter.grad != 0).any())


def drop_gradients(parameters: Sequence[torch.nn.Parameter], keep_zeros: bool) -> None:
    """Leave no gradient, or with ``keep_zeros`` zeros, which a scaler needs."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if keep_zeros else None


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
