"""The reduced gradient that a member holds from the end of a round's reduction to its commit."""

from dataclasses import dataclass

from fabric.model import Int64


@dataclass(frozen=True, slots=True)
class PreparedRound:
    """A fully reduced round, with all that its commit applies and announces."""

    epoch: Int64
    step: Int64
    gradient_digest: str
    weight: float
    contributions: tuple[tuple[str, tuple[Int64, ...]], ...]  # micro-batches by member, in roster order
    metrics: tuple[tuple[str, float], ...] = ()  # sums over the members
    nonfinite: str = ""  # a tensor of the sum that is not finite: the step is committed without an update
