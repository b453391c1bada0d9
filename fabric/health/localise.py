"""Say where a slowdown is: in a rank, a stage, a whole replica, or in the whole job.

The input is how much longer than predicted each unit takes. Waiting for others is not part of it, and units
that have failed are left out: a failure comes before a slowdown.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from statistics import median

from fabric.model import Value

SLOW = 1.10  # a unit is slow above this factor over the equal units of other replicas
MANY = 64  # a unit is compared with about this many equal units


class Unit(Value, order=True):
    """One device of a job."""

    replica: str
    stage: int = 0
    rank: int = 0  # rank within the stage


class Scope(StrEnum):
    """The extent of a slowdown."""

    RANK = "rank"
    STAGE = "stage"
    LINK = "link"
    REPLICA = "replica"
    JOB = "job"


class Slowdown(Value):
    """One slow rank, stage, link, replica or job, with the evidence."""

    scope: Scope
    units: tuple[Unit, ...]  # the slow units; for a link its two ends; empty where the whole job is slow
    factor: float  # time of the slow units over the time of equal units
    evidence: str

    @property
    def replica(self) -> str:
        return self.units[0].replica if self.units else ""

    @property
    def is_between_replicas(self) -> bool:
        """Whether it is the link from one replica to another."""
        return self.scope is Scope.LINK and len({unit.replica for unit in self.units}) == 2


Ratios = Mapping[Unit, float]


def localise(ratios: Ratios) -> list[Slowdown]:
    """The slowdowns, the slowest first; empty where nothing is slow.

    ``ratios``: observed over predicted seconds.
    """
    living = {unit: ratio for unit, ratio in ratios.items() if math.isfinite(ratio) and ratio > 0}
    equals = _Equals(living)
    relative = {unit: ratio / equals.usual(unit) for unit, ratio in living.items() if ratio > SLOW}
    slow = {unit for unit, factor in relative.items() if factor > SLOW}
    slowdowns = [_accuse(scope, units, relative, living) for scope, units in _groups(slow, living)]
    if slowdowns:
        return sorted(slowdowns, key=lambda slowdown: -slowdown.factor)
    common = median(list(living.values())) if living else 1.0
    if common > SLOW:
        replicas = len({unit.replica for unit in living})
        compared = f"none of {replicas} replicas is slower than its equals"
        compared = compared if len(living) > 1 else "there is nothing to compare it with"
        text = f"the whole job takes {common:.2f} times as long as predicted: {compared}"
        return [Slowdown(Scope.JOB, (), common, text)]
    return []


class _Equals:
    """The ratios of the units, grouped by equal place in their replicas."""

    def __init__(self, ratios: Ratios) -> None:
        self._ratios = ratios
        self._by_place: dict[tuple[int, ...], list[tuple[str, float]]] = {}
        for unit, ratio in ratios.items():
            for place in ((unit.stage, unit.rank), (unit.stage,)):
                self._by_place.setdefault(place, []).append((unit.replica, ratio))

    def usual(self, unit: Unit) -> float:
        """The median ratio of the same rank in other replicas, or else of the other units of its replica."""
        for place in ((unit.stage, unit.rank), (unit.stage,)):
            there = self._by_place[place]
            if len(there) > MANY:  # with more units than this, a single unit does not move the median
                there = there[:: len(there) // MANY]
            elsewhere = [ratio for replica, ratio in there if replica != unit.replica]
            if elsewhere:
                return median(elsewhere)
        beside = [r for u, r in self._ratios.items() if u.replica == unit.replica and u != unit]
        return median(beside) if beside else self._ratios[unit]


def _groups(slow: Collection[Unit], ratios: Ratios) -> Iterable[tuple[Scope, tuple[Unit, ...]]]:
    """The slow units, grouped where they make up a whole stage or replica."""
    for replica in sorted({unit.replica for unit in slow}):
        units = {unit for unit in ratios if unit.replica == replica}
        guilty = {unit for unit in slow if unit.replica == replica}
        if guilty == units:
            yield Scope.REPLICA, tuple(sorted(guilty))
            continue
        for stage in sorted({unit.stage for unit in guilty}):
            members = {unit for unit in units if unit.stage == stage}
            if members <= guilty and members != units:
                yield Scope.STAGE, tuple(sorted(members))
            else:
                yield from ((Scope.RANK, (unit,)) for unit in sorted(guilty & members))


def _accuse(scope: Scope, units: tuple[Unit, ...], relative: Ratios, ratios: Ratios) -> Slowdown:
    factor = median([relative[unit] for unit in units])
    own = median([ratios[unit] for unit in units])
    place = {
        Scope.REPLICA: f"replica {units[0].replica}",
        Scope.STAGE: f"stage {units[0].stage} of replica {units[0].replica}",
        Scope.RANK: f"rank {units[0].rank} of stage {units[0].stage} of replica {units[0].replica}",
    }[scope]
    others = len(ratios) - len(units)
    return Slowdown(
        scope,
        units,
        factor,
        f"{place} takes {own:.2f} times as long as predicted for its work, and {factor:.2f} times as long as "
        f"its equals ({others} others compared)",
    )
