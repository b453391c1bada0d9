"""The reduced gradient that a member holds from the end of a round's reduction to its commit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreparedRound:
    """A fully reduced round, as its commit applies and tells it."""

    epoch: int
    step: int
    gradient_digest: str
    weight: float
    contributions: tuple[tuple[str, tuple[int, ...]], ...]  # micro-batches by member, in roster order
    metrics: tuple[tuple[str, float], ...] = ()  # sums over the members
    nonfinite: str = ""  # a tensor of it that is not finite: such a step is committed without an update
