"""The work of micro-batches: the quantities from which their time is predicted."""

import math
from collections.abc import Iterable, Sequence

from fabric.model import Value


class WorkAmount(Value):
    """The work of one micro-batch, or the sum over several."""

    tokens: float  # tokens, or another declared amount; without a declaration, the number of samples
    squares: float = 0.0  # sum of the squared lengths of the packed documents; the work of attention
    samples: float = 0.0
    micro_batches: int = 1

    @classmethod
    def of_documents(cls, lengths: Sequence[float], samples: float = 1.0) -> "WorkAmount":
        """One micro-batch of packed documents with a block-diagonal mask; invalid with a negative length."""
        tokens = float(sum(lengths)) if min(lengths, default=0) >= 0 else -1.0
        return cls(tokens, float(sum(x * x for x in lengths)), samples)

    @classmethod
    def total(cls, amounts: Iterable["WorkAmount"]) -> "WorkAmount":
        """The sum of all ``amounts``."""
        tokens = squares = samples = 0.0
        count = 0
        for amount in amounts:
            tokens, squares = tokens + amount.tokens, squares + amount.squares
            samples, count = samples + amount.samples, count + amount.micro_batches
        return cls(tokens, squares, samples, count)

    @property
    def is_valid(self) -> bool:
        """Whether it can predict a time: finite, no number below zero, at least one micro-batch."""
        numbers = (self.tokens, self.squares, self.samples)
        return self.micro_batches > 0 and all(math.isfinite(x) and x >= 0 for x in numbers)


def is_time(seconds: object) -> bool:
    """Whether ``seconds`` is a finite number above zero."""
    return isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0
