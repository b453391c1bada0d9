"""Whole gradients gathered, and reductions that only users' collectives choose."""

import torch

from fabric.ftar.buckets import FlatGradients
from fabric.ftar.reduce_ops import Reduction

MIN = Reduction("min")
MAX = Reduction("max")


def mean(weight: float) -> Reduction:
    """The sum divided by the total ``weight``."""
    return Reduction("mean", weight)


def gather(flat: FlatGradients, into: torch.Tensor) -> None:
    """Copy every ``.grad`` into the buffer, bucket by bucket."""
    for bucket in flat.buckets:
        flat.gather_bucket(bucket, into)
