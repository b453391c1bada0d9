"""The verdict as tables of text, for the terminal and for the page."""

import math
import statistics
from dataclasses import dataclass

from fabric.drill.judge.drill_verdict import DrillVerdict, FaultCost


@dataclass(frozen=True, slots=True)
class DrillTable:
    """A table with its title; every cell is text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def expectation_table(verdict: DrillVerdict) -> DrillTable:
    """Return one row per expectation."""
    rows = tuple(
        (
            outcome.expectation,
            outcome.shown,
            "-" if outcome.value is None and outcome.holds else "yes" if outcome.holds else "NO",
            outcome.why,
        )
        for outcome in verdict.outcomes
    )
    return DrillTable("Expectations", ("expected", "measured", "held", "why not"), rows)


def fault_table(verdict: DrillVerdict) -> DrillTable:
    """Return one row per fault, in order of time; seconds count from the first fault."""
    zero = min((cost.fault.began for cost in verdict.costs), default=0.0)
    rows = tuple(
        (
            f"{cost.fault.began - zero:.1f} s",
            cost.fault.title,
            f"{cost.fault.ended - cost.fault.began:.1f} s",
            _seconds(cost.stall_s),
            _rejoined(cost),
            cost.fault.observed or "NO EFFECT SEEN",
        )
        for cost in verdict.costs
    )
    return DrillTable("Faults", ("at", "fault", "lasted", "stall", "back after", "seen"), rows)


def kind_table(verdict: DrillVerdict) -> DrillTable:
    """Return one row per kind of fault: the count, and the distribution of the stalls."""
    stalls: dict[str, list[float]] = {}
    for cost in verdict.costs:
        stalls.setdefault(cost.fault.name, []).extend([] if cost.stall_s is None else [cost.stall_s])
    counts = {name: sum(cost.fault.name == name for cost in verdict.costs) for name in stalls}
    rows = tuple(
        (
            name,
            str(counts[name]),
            _seconds(statistics.median(values) if values else None),
            _seconds(max(values, default=None)),
        )
        for name, values in sorted(stalls.items())
    )
    return DrillTable("Faults by kind", ("fault", "count", "median stall", "longest stall"), rows)


def _rejoined(cost: FaultCost) -> str:
    if not cost.rejoined_s:
        return "-"
    worst = max(cost.rejoined_s.values())
    return "never" if math.isinf(worst) else f"{worst:.3f} s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
