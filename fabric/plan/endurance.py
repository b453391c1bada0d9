"""How many failures a layout of shards masks before a type has no living host (a wipe-out)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

# The most groups for exact enumeration, which visits all subsets: 2 ** 20 take about a second.
MOST_GROUPS_EXACT = 20


@dataclass(frozen=True, slots=True)
class Endurance:
    """The failures masked before a wipe-out, over uniformly random orders of failure.

    ``mean``: expected number. ``error``: half width of the 95 % confidence interval of the mean, 0 where
    exact.
    """

    mean: float
    error: float


def endurance_exact(stacks: Sequence[Sequence[int]]) -> Endurance:
    """Return the exact mean over all orders of failure, by enumerating the sets of failed groups.

    ``stacks``: the types that each group hosts. Raises ValueError for more than 20 groups.

    The mean is the sum over k >= 1 of the probability that every type has a host after k failures.
    """
    groups = len(stacks)
    if groups > MOST_GROUPS_EXACT:
        raise ValueError(
            f"{groups} groups have too many subsets to enumerate: use endurance_sampled above"
            f" {MOST_GROUPS_EXACT}"
        )
    hosts = _host_masks(stacks)
    mean = 0.0
    for count in range(1, groups):
        masked = sum(
            all(types & ~failed for types in hosts)
            for failed in (sum(1 << g for g in lost) for lost in combinations(range(groups), count))
        )
        if not masked:
            break
        mean += masked / math.comb(groups, count)
    return Endurance(mean, 0.0)


def endurance_sampled(stacks: Sequence[Sequence[int]], samples: int = 2000, seed: int = 0) -> Endurance:
    """Return the mean by Monte Carlo: ``samples`` random orders of failure.

    A type is wiped out when its last host fails. So a sample takes one random permutation of the groups,
    finds the latest position among each type's hosts, and returns the least of these.
    """
    if samples < 2:
        raise ValueError(f"a confidence interval needs at least 2 samples, not {samples}")
    rng = np.random.default_rng(seed)
    hosts: list[list[int]] = [[] for _ in stacks]
    for group, stack in enumerate(stacks):
        for type_ in stack:
            hosts[type_].append(group)
    widest = max(len(h) for h in hosts)
    table = np.array(
        [h + h[:1] * (widest - len(h)) for h in hosts]
    )  # shape (types, most hosts), padded by repeating a host
    masked = np.array([rng.permutation(len(stacks))[table].max(axis=1).min() for _ in range(samples)], float)
    return Endurance(float(masked.mean()), 1.96 * float(masked.std(ddof=1)) / math.sqrt(samples))


def _host_masks(stacks: Sequence[Sequence[int]]) -> list[int]:
    masks = [0] * len(stacks)
    for group, stack in enumerate(stacks):
        for type_ in stack:
            masks[type_] |= 1 << group
    return masks
