"""The failures that a layout of shards masks before a type has no living host: exact, and by Monte Carlo."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from papers.published import mean_masked

from fabric.plan.closed_forms import masked_failures, masked_failures_replication
from fabric.protocol.rules.spare import consecutive_offsets, golomb_offsets, ring_layout


@dataclass(frozen=True)
class Sampled:
    """``error``: half width of the 95 % confidence interval of the mean."""

    mean: float
    error: float


def sampled_masked(stacks, samples: int = 2000, seed: int = 0) -> Sampled:
    """Return the mean over random orders of failures; a type is lost when its last host fails."""
    rng = np.random.default_rng(seed)
    hosts = [[] for _ in stacks]
    for group, stack in enumerate(stacks):
        for type_ in stack:
            hosts[type_].append(group)
    widest = max(len(h) for h in hosts)
    # repeat a host, so that all rows have equal length
    table = np.array([h + h[:1] * (widest - len(h)) for h in hosts])
    masked = np.array([rng.permutation(len(stacks))[table].max(axis=1).min() for _ in range(samples)], float)
    return Sampled(float(masked.mean()), 1.96 * float(masked.std(ddof=1)) / math.sqrt(samples))


def block_layout(groups: int, redundancy: int) -> tuple[tuple[int, ...], ...]:
    """Traditional replication: the r groups of a block all host the r types of the block.

    A last block with fewer groups hosts only its own types, so its types have fewer hosts.
    """
    stacks = []
    for group in range(groups):
        first = group - group % redundancy
        block = list(range(first, min(first + redundancy, groups)))
        position = group - first
        stacks.append(tuple(block[position:] + block[:position]))
    return tuple(stacks)


def test_seven_groups_with_a_perfect_difference_set_mask_three_failures():
    assert mean_masked(ring_layout(7, (0, 1, 3))) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "stacks",
    [ring_layout(11, (0, 1, 3)), ring_layout(9, (0, 1, 2)), block_layout(9, 3), block_layout(8, 3)],
    ids=["difference set", "consecutive", "blocks", "blocks with a rest"],
)
def test_samples_agree_with_the_enumeration(stacks):
    sampled = sampled_masked(stacks, samples=4000, seed=3)
    assert abs(sampled.mean - mean_masked(stacks)) < 2 * sampled.error


def test_a_golomb_layout_masks_more_failures_than_consecutive_hosts_and_blocks():
    golomb = sampled_masked(ring_layout(60, golomb_offsets(60, 5)), seed=1)
    consecutive = sampled_masked(ring_layout(60, consecutive_offsets(60, 5)), seed=1)
    blocks = sampled_masked(block_layout(60, 5), seed=1)
    assert golomb.mean < blocks.mean  # blocks: 12 groups of hosts can be lost; Golomb: 60 types can be lost
    assert golomb.mean < consecutive.mean
    assert golomb.mean == pytest.approx(masked_failures(60, 5), rel=0.05)
    assert blocks.mean == pytest.approx(masked_failures_replication(60, 5), rel=0.1)
