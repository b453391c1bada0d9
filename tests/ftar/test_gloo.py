"""gloo behind the same interface: the results of the ring, and an abort that ends the wait."""

import pytest
import torch
from ftar.gathering import MAX, MIN, mean
from ftar.gloo_plane import gloo_plane
from ring_harness import WAIT_S, RingMembers, documented, random_tensor, same_bits

from fabric.errors import RoundAborted
from fabric.ftar.reduce_ops import SUM
from fabric.ftar.ring_schedule import DTYPE_CODES, segment_bounds


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gloo_reduces_to_the_same_bits_as_the_ring(world):
    with RingMembers(world, make=gloo_plane) as members:
        members.install(1)
        for step, dtype in enumerate(DTYPE_CODES):
            for reduction in (SUM, MIN, MAX):
                inputs = [random_tensor(1001, dtype, 10 * step + i) for i in range(world)]
                results = members.reduce(1, step, inputs, reduction, "kept")
                expected = documented(inputs, segment_bounds(1001, world), reduction)
                for result in results.values():
                    assert same_bits(result, results[0])
                    if dtype.is_floating_point:
                        tolerance = 8 * torch.finfo(dtype).eps
                        torch.testing.assert_close(result, expected, rtol=tolerance, atol=100 * tolerance)
                    else:
                        assert same_bits(result, expected)
        result = members.reduce(1, 99, [torch.full((7,), 3.0)] * world, mean(2.0), "kept")[0]
        assert torch.equal(result, torch.full((7,), 1.5 * world))


def test_an_abort_ends_the_wait_and_the_next_epoch_works():
    with RingMembers(2, make=lambda: gloo_plane(exchange_s=2.0)) as members:
        members.install(1)
        members.reduce(1, 1, [torch.ones(10)] * 2)
        futures = members.start(1, 2, {0: torch.ones(10)})
        members.planes[0].abort(1, "m1 is gone", about="m1")
        with pytest.raises(RoundAborted, match="m1 is gone"):
            futures[0].result(WAIT_S)
        members.install(2)
        assert torch.equal(members.reduce(2, 2, [torch.ones(10)] * 2)[0], torch.full((10,), 2.0))
