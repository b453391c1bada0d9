"""Metrics that are not finite survive messages that allow only finite numbers."""

import math

import pytest

from fabric.client.loop.step import finite, restored

NAN, INF = math.nan, math.inf


def travelled(*contributions):
    """Return the user's metrics after their sum over the messages."""
    totals = {}
    for contribution in contributions:
        for name, value in finite(contribution):
            assert math.isfinite(value)
            totals[name] = totals.get(name, 0.0) + value
    return restored(sorted(totals.items()))


@pytest.mark.parametrize(
    "values", [(1.0, 2.0), (1.0, NAN), (INF, 2.0), (-INF, 1.0), (INF, -INF), (NAN, INF), (INF, INF)]
)
def test_infinities_in_a_metric_sum_as_floating_point_numbers_do(values):
    found = travelled(*({"loss": v, "n": 1.0} for v in values))
    assert found == pytest.approx({"loss": sum(values), "n": 2.0}, nan_ok=True)


def test_finite_values_are_untouched():
    assert finite({"b": 2.0, "a": 1.0}) == (("a", 1.0), ("b", 2.0))
    assert restored((("a", 1.0),)) == {"a": 1.0}
