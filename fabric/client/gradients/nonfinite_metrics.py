"""Carries infinite and NaN metrics, for which JSON has no number.

Sums travel as finite numbers only. A value that is not finite travels as a count, ``nan:loss``, which adds up
over members like any other sum. When the user reads the metric, the count becomes infinity or NaN again.
"""

import math
from collections.abc import Iterable, Mapping

_MARKS = {"nan:": math.nan, "inf:": math.inf, "-inf:": -math.inf}


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return ``metrics`` as (name, finite number) by name, with counts for values that are not finite."""
    sums: dict[str, float] = {}
    for name, value in metrics.items():
        sums[name] = value if math.isfinite(value) else 0.0
        if not math.isfinite(value):
            mark = "nan:" if math.isnan(value) else "inf:" if value > 0 else "-inf:"
            sums[mark + name] = 1.0
    return tuple(sorted(sums.items()))


def restored(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sums that floating point would have given."""
    sums = dict(metrics)
    for mark, value in _MARKS.items():
        for marked in [name for name in sums if name.startswith(mark)]:
            count, name = sums.pop(marked), marked.removeprefix(mark)
            sums[name] = sums.get(name, 0.0) + (value if count else 0.0)
    return sums
