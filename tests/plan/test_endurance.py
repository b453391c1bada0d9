"""Endurance: exact against Monte Carlo, and the layouts against each other."""

import pytest

from fabric.plan.closed_forms import masked_failures, masked_failures_replication
from fabric.plan.endurance import endurance_exact, endurance_sampled
from fabric.protocol.rules.spare import block_layout, consecutive_offsets, golomb_offsets, ring_layout


def test_seven_groups_with_a_perfect_difference_set_mask_three_failures():
    assert endurance_exact(ring_layout(7, (0, 1, 3))).mean == pytest.approx(3.0)


@pytest.mark.parametrize(
    "stacks",
    [ring_layout(13, (0, 1, 3, 9)), ring_layout(9, (0, 1, 2)), block_layout(9, 3), block_layout(8, 3)],
    ids=["difference set", "consecutive", "blocks", "blocks with a rest"],
)
def test_samples_agree_with_the_enumeration(stacks):
    exact, sampled = endurance_exact(stacks), endurance_sampled(stacks, samples=4000, seed=3)
    assert exact.error == 0
    assert abs(sampled.mean - exact.mean) < 2 * sampled.error


def test_a_golomb_layout_masks_more_failures_than_consecutive_hosts_and_blocks():
    golomb = endurance_sampled(ring_layout(60, golomb_offsets(60, 5)), seed=1)
    consecutive = endurance_sampled(ring_layout(60, consecutive_offsets(60, 5)), seed=1)
    blocks = endurance_sampled(block_layout(60, 5), seed=1)
    assert golomb.mean < blocks.mean  # 12 blocks can be wiped out, 60 types can
    assert golomb.mean < consecutive.mean
    assert golomb.mean == pytest.approx(masked_failures(60, 5), rel=0.05)
    assert blocks.mean == pytest.approx(masked_failures_replication(60, 5), rel=0.1)


def test_too_many_groups_for_an_enumeration_are_refused():
    with pytest.raises(ValueError, match="use endurance_sampled above 20"):
        endurance_exact(ring_layout(21, (0, 1)))
    with pytest.raises(ValueError, match="at least 2 samples"):
        endurance_sampled(ring_layout(5, (0, 1)), samples=1)
