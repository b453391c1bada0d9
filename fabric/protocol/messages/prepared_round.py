"""What a member holds between the end of a round's reduction and its commit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreparedRound:
    """A fully reduced round: what its commit will apply and say.

    ``contributions`` are the micro-batches by member in roster order, ``metrics`` their sums.
    ``nonfinite`` names a tensor of it that is not finite: such a step is committed without an update.
    """

    epoch: int
    step: int
    gradient_digest: str
    weight: float
    contributions: tuple[tuple[str, tuple[int, ...]], ...]
    metrics: tuple[tuple[str, float], ...] = ()
    nonfinite: str = ""
