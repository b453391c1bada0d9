"""Expectations of a drill, such as ``stall<=1s`` and ``digests-equal``: their form and their bounds."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from enum import StrEnum

from fabric.errors import ConfigError
from fabric.model import Value

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0}
_FORM = re.compile(r"([a-z_]+)\s*(?:(<=|>=|==|<|>)\s*([0-9.]+)\s*([a-z]*))?")


class MeasureUnit(StrEnum):
    """The unit of a measure."""

    SECONDS = "seconds"
    COUNT = "count"
    TRUTH = "yes or no"


# Measure -> its unit, and its meaning.
MEASURES: Mapping[str, tuple[MeasureUnit, str]] = {
    "promises_kept": (MeasureUnit.TRUTH, "the journals show every promise of the protocol kept"),
    "digests_equal": (MeasureUnit.TRUTH, "all digests of one step are equal"),
    "samples_exactly_once": (MeasureUnit.TRUTH, "each sample of each committed step counts once"),
    "status_true": (MeasureUnit.TRUTH, "the first line of the status counts and names who is away"),
    "sources_agree": (MeasureUnit.TRUTH, "journals, recovery records and the drill's observations agree"),
    "steps": (MeasureUnit.COUNT, "committed steps"),
    "steps_lost": (MeasureUnit.COUNT, "committed steps that a cold start undid, or that no journal has"),
    "samples_skipped": (MeasureUnit.COUNT, "samples of committed steps that no gradient has"),
    "samples_repeated": (MeasureUnit.COUNT, "samples that a gradient has twice"),
    "restarts": (MeasureUnit.COUNT, "processes that ended without a fault of the drill"),
    "stall": (MeasureUnit.SECONDS, "longest time between two commits of a survivor, less the median step"),
    "standstill": (MeasureUnit.SECONDS, "longest time in which no replica committed a step"),
    "unexplained_wait": (MeasureUnit.SECONDS, "longest standstill outside faults and recoveries"),
    "rejoined": (MeasureUnit.SECONDS, "longest time from a fault's end to the next commit of its replica"),
}

# The expectations of a healthy job. A measure that has nothing to measure fails none of these.
MAY_LOSE = "steps_lost==0"
DEFAULTS = (
    "promises-kept",
    MAY_LOSE,
    "digests-equal",
    "samples-exactly-once",
    "sources-agree",
    "status-true",
    "restarts==0",
    "stall<=10s",
    "unexplained-wait<=10s",
    "rejoined<=120s",
)


class Expectation(Value):
    """One bound on one measure; a measure of unit TRUTH has no bound."""

    text: str
    measure: str
    comparison: str = ""
    bound: float = 1.0

    @property
    def unit(self) -> MeasureUnit:
        return MEASURES[self.measure][0]

    def holds(self, value: float) -> bool:
        return (
            value == 1.0 if self.unit is MeasureUnit.TRUTH else _OPERATORS[self.comparison](value, self.bound)
        )


def parse_expectation(text: str) -> Expectation:
    """Parse ``stall<=1s`` or ``digests-equal``. Raises ConfigError with one sentence."""
    shown = text[:80]
    form = _FORM.fullmatch(text.strip().lower().replace("-", "_"))
    if form is None:
        raise ConfigError(f'the expectation "{shown}" cannot be read: write it as stall<=1s or digests-equal')
    measure, comparison, number, unit = form.groups()
    if measure not in MEASURES:
        names = ", ".join(sorted(MEASURES)).replace("_", "-")
        raise ConfigError(f'the expectation "{shown}" names no measure: give one of {names}')
    kind = MEASURES[measure][0]
    if kind is MeasureUnit.TRUTH:
        if comparison:
            raise ConfigError(f'the expectation "{shown}" bounds {measure}, which is yes or no')
        return Expectation(text, measure)
    if not comparison:
        example = "1s" if kind is MeasureUnit.SECONDS else "0"
        raise ConfigError(f'the expectation "{shown}" has no bound: write {measure}<={example}')
    return Expectation(text, measure, comparison, _bound(shown, kind, number, unit))


def _bound(shown: str, kind: MeasureUnit, number: str, unit: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise ConfigError(f'the expectation "{shown}" has the bound "{number[:40]}", which is not a number')
    if kind is MeasureUnit.COUNT:
        if unit:
            raise ConfigError(f'the expectation "{shown}" counts something: leave the unit "{unit}" away')
        return value
    if unit not in _SECONDS:
        raise ConfigError(f'the expectation "{shown}" needs a unit of time: {", ".join(_SECONDS)}')
    return value * _SECONDS[unit]
