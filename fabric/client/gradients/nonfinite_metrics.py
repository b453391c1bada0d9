"""Metrics that are no numbers: a loss may be infinite or NaN, and JSON has no word for either.

Sums travel as finite numbers alone. What is not finite travels as a count beside them, ``nan:loss``, which
adds up over members like any other sum, and becomes the value again where the user reads it.
"""

import math
from collections.abc import Iterable, Mapping

_MARKS = {"nan:": math.nan, "inf:": math.inf, "-inf:": -math.inf}


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """``metrics`` as (name, finite number) in order of name, with counts for what is not finite."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        found[name] = value if math.isfinite(value) else 0.0
        if not math.isfinite(value):
            mark = "nan:" if math.isnan(value) else "inf:" if value > 0 else "-inf:"
            found[mark + name] = 1.0
    return tuple(sorted(found.items()))


def restored(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sums as floating point would have given them."""
    found = dict(metrics)
    for mark, value in _MARKS.items():
        for marked in [name for name in found if name.startswith(mark)]:
            count, name = found.pop(marked), marked.removeprefix(mark)
            found[name] = found.get(name, 0.0) + (value if count else 0.0)
    return found
