"""The remedies for a slow or shrunken replica, cheapest first, each with its gain, its cost and its reason.

The planner compares step times under the shares that each arrangement allows. A remedy's gain is what it adds
to the gain of the cheaper remedies. A remedy that gains less than the threshold or does not pay back its cost
is not proposed. Only ratios of speeds count: when all replicas are equally slow, nothing is proposed.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fabric.health.planning.layout import ModelCut, ReplicaHealth, StageLayout, exclude, resplit
from fabric.health.planning.partition import micro_batch_shares


class RemedyKind(StrEnum):
    """The kinds of remedies, cheapest first."""

    SHARES = "shares"  # other micro-batches per replica: one write of the record, in force from the next step
    REPARTITION = "repartition"  # one replica comes back with another split of its layers
    EXCLUSION = "exclusion"  # one replica comes back with smaller groups of ranks
    DRAIN = "drain"  # one replica leaves; a spare takes its place where a spare exists


@dataclass(frozen=True, slots=True)
class ActionRules:
    """When a remedy is worth its cost."""

    least_gain: float = 0.05  # the least gain of throughput, as a share, for which a remedy is proposed
    hysteresis: float = 0.03  # two speeds count as equal if they differ by less than this share
    rejoin_s: float = 60.0  # how long a replica that changes its layout is away
    horizon_s: float = 3600.0  # a remedy must gain back its cost within this many seconds

    def __post_init__(self) -> None:
        values = (self.least_gain, self.hysteresis, self.rejoin_s, self.horizon_s)
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("a rule of adaptation is negative or no number: give zero or more")


@dataclass(frozen=True, slots=True)
class JobHealth:
    """The planner's knowledge of a job."""

    micro_batches: int  # number of micro-batches of the global batch
    replicas: tuple[ReplicaHealth, ...]
    cut: ModelCut
    spares: tuple[ReplicaHealth, ...] = ()  # replicas that stand by


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica's part of a plan."""

    replica: str
    layout: StageLayout
    micro_batches: int  # number of micro-batches per step


@dataclass(frozen=True, slots=True)
class AdaptationPlan:
    """Layouts and micro-batches of all replicas, in force from one step boundary on."""

    replicas: tuple[ReplicaPlan, ...]
    joins: str = ""  # the spare that takes a drained replica's place

    def of(self, replica: str) -> ReplicaPlan | None:
        """The entry of one replica, None where the plan leaves it out."""
        return next((entry for entry in self.replicas if entry.replica == replica), None)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One action, and why."""

    kind: RemedyKind
    replica: str  # the replica that the remedy changes; empty: several replicas
    gain: float  # throughput gained beyond the cheaper remedies, as a share
    cost_s: float  # time that the job loses by the change
    reason: str  # the reason for the remedy in one sentence
    plan: AdaptationPlan
    undoes: bool = False  # whether the remedy undoes an earlier remedy


def propose(job: JobHealth, rules: ActionRules) -> tuple[Remedy, ...]:
    """Plan the remedies for a job, cheapest first; none for a job that cannot be planned."""
    try:
        for replica in (*job.replicas, *job.spares):
            replica.check(job.cut.layers)
        remedies = tuple(_Planner(_level(job), rules).remedies())
    except ValueError:
        return ()
    order = list(RemedyKind)
    return tuple(sorted(remedies, key=lambda x: (order.index(x.kind), -x.gain, x.replica)))


def _level(job: JobHealth) -> JobHealth:
    """Divide all speeds by the median of the living ranks' speeds."""
    living = [speed for replica in job.replicas for speed in replica.speeds if speed > 0]
    middle = statistics.median(living) if living else 1.0

    def leveled(replica: ReplicaHealth) -> ReplicaHealth:
        return replace(replica, speeds=tuple(speed / middle for speed in replica.speeds))

    return replace(
        job,
        replicas=tuple(leveled(replica) for replica in job.replicas),
        spares=tuple(leveled(spare) for spare in job.spares),
    )


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The replicas that take part in steps, each in one layout."""

    total: int  # total number of micro-batches
    hysteresis: float
    layouts: Mapping[str, StageLayout]
    speeds: Mapping[str, tuple[float, ...]]

    def capacity(self, replica: str) -> float:
        """Micro-batches per time at the slowest stage."""
        return 1 / self.layouts[replica].slowest_stage(self.speeds[replica])

    def level_capacities(self) -> dict[str, float]:
        """The capacities; a capacity near the median counts as the median, so that noise changes nothing."""
        capacities = {replica: self.capacity(replica) for replica in self.layouts}
        middle = statistics.median(capacities.values())
        return {
            replica: middle if abs(capacity / middle - 1) <= self.hysteresis else capacity
            for replica, capacity in capacities.items()
        }

    def shares(self) -> dict[str, int]:
        """Replica -> micro-batches, in proportion to the capacities."""
        capacities = self.level_capacities()
        return dict(zip(capacities, micro_batch_shares(self.total, list(capacities.values())), strict=True))

    def step_time(self, shares: Mapping[str, int]) -> float:
        return max(self.layouts[name].step_time(count, self.speeds[name]) for name, count in shares.items())

    def best_time(self) -> float:
        """The time of a step with the best shares; inf where no replica is left."""
        return self.step_time(self.shares()) if self.layouts else math.inf

    def with_layout(self, replica: str, layout: StageLayout, speeds: tuple[float, ...]) -> "_Fleet":
        return replace(
            self, layouts={**self.layouts, replica: layout}, speeds={**self.speeds, replica: speeds}
        )

    def without(self, replica: str) -> "_Fleet":
        return replace(
            self, layouts={name: layout for name, layout in self.layouts.items() if name != replica}
        )


class _Planner:
    def __init__(self, job: JobHealth, rules: ActionRules) -> None:
        self._job, self._rules = job, rules
        self._health = {replica.replica: replica for replica in (*job.replicas, *job.spares)}
        present = [replica for replica in job.replicas if replica.present]
        if not present:
            raise ValueError("no replica of the job can take part in a step: there is nothing to plan from")
        self._fleet = _Fleet(
            job.micro_batches,
            rules.hysteresis,
            {replica.replica: replica.layout for replica in present},
            {replica.replica: replica.speeds for replica in present},
        )
        self._base_s = self._fleet.best_time()

    def remedies(self) -> Iterator[Remedy]:
        yield from self._shares()
        for replica in self._job.replicas:
            remedy = self._layout_remedy(replica)
            if remedy is not None:
                yield remedy
            yield from self._drain(replica, self._base_s / (1 + remedy.gain if remedy else 1))

    # --- shares ---------------------------------------------------------------------------------------

    def _current(self) -> dict[str, int]:
        """Replica -> micro-batches now. Those of an absent replica are divided in the same proportions."""
        counts = {name: self._health[name].micro_batches for name in self._fleet.layouts}
        if sum(counts.values()) == self._job.micro_batches:
            return counts
        weights = [max(count, 1) for count in counts.values()]
        return dict(zip(counts, micro_batch_shares(self._job.micro_batches, weights), strict=True))

    def _shares(self) -> Iterator[Remedy]:
        fleet, current = self._fleet, self._current()
        target, now_s = fleet.shares(), fleet.step_time(current)
        gain = now_s / self._base_s - 1
        even = len(set(fleet.level_capacities().values())) == 1
        if gain < 0 or (gain < self._rules.least_gain and not even):
            return
        if target == current or (even and sorted(target.values()) == sorted(current.values())):
            return
        slowest = min(fleet.layouts, key=fleet.capacity)
        reason = (
            "all replicas compute equally fast again: each gets its equal share of the micro-batches"
            if even
            else f"replica {slowest} computes at {self._relative(slowest):.2f} of the median speed:"
            f" with {target[slowest]} and not {current[slowest]} micro-batches a step takes"
            f" {self._base_s / now_s:.2f} of its time"
        )
        name = "" if even else slowest
        yield Remedy(RemedyKind.SHARES, name, gain, 0.0, reason, self._plan(fleet), undoes=even)

    def _relative(self, replica: str) -> float:
        capacities = [self._fleet.capacity(name) for name in self._fleet.layouts]
        return self._fleet.capacity(replica) / statistics.median(capacities)

    # --- layouts --------------------------------------------------------------------------------------

    def _layout_remedy(self, replica: ReplicaHealth) -> Remedy | None:
        """Another layout for a replica. Repartition and exclusion cost one rejoin each, so an exclusion must
        gain enough beyond a repartition."""
        repartition, exclusion = (self._change(replica, kind) for kind in _LAYOUT_KINDS)
        if repartition is None or exclusion is None:
            return repartition or exclusion
        beyond = (1 + exclusion.gain) / (1 + repartition.gain) - 1
        return exclusion if beyond >= self._rules.least_gain else repartition

    def _change(self, replica: ReplicaHealth, kind: RemedyKind) -> Remedy | None:
        try:
            target = self._target(replica, kind)
            if target is None or target == self._fleet.layouts.get(replica.replica):
                return None
            fleet = self._fleet.with_layout(replica.replica, target, replica.speeds)
            gain = self._base_s / fleet.best_time() - 1
        except ValueError:  # this replica cannot have this remedy
            return None
        cost_s = self._absence_cost(replica)
        if gain < self._rules.least_gain or self._rules.horizon_s * gain / (1 + gain) < cost_s:
            return None
        reason = _layout_reason(replica, kind, target, gain)
        return Remedy(kind, replica.replica, gain, cost_s, reason, self._plan(fleet))

    def _target(self, replica: ReplicaHealth, kind: RemedyKind) -> StageLayout | None:
        """The layout that this kind of remedy gives, None where the kind does not apply."""
        cut = self._job.cut
        if kind is RemedyKind.EXCLUSION:
            if not cut.can_resize:
                return None
            if self._is_even([replica.speeds[rank] for group in replica.layout.groups for rank in group]):
                return None
            return exclude(replica.layout, replica.speeds, cut)
        layout = replica.layout
        if not cut.can_repartition or layout.stages == 1 or not replica.present:
            return None
        per_rank = [
            speed / len(group)
            for speed, group in zip(layout.stage_speeds(replica.speeds), layout.groups, strict=True)
        ]
        return None if self._is_even(per_rank) else resplit(layout, replica.speeds, cut)

    def _is_even(self, speeds: list[float]) -> bool:
        return min(speeds) > 0 and max(speeds) / min(speeds) - 1 <= self._rules.hysteresis

    def _absence_cost(self, replica: ReplicaHealth) -> float:
        """The time that the job loses while the replica changes its layout."""
        if not replica.present:
            return 0.0
        away_s = self._fleet.without(replica.replica).best_time()
        return self._rules.rejoin_s * max(0.0, 1 - self._base_s / away_s)

    # --- drain ----------------------------------------------------------------------------------------

    def _drain(self, replica: ReplicaHealth, best_s: float) -> Iterator[Remedy]:
        name = replica.replica
        if not replica.present or self._relative(name) >= 1 - self._rules.hysteresis:
            return
        spare = next((spare for spare in self._job.spares if spare.present), None)
        fleet = self._fleet.without(name)
        if spare is not None:
            fleet = fleet.with_layout(spare.replica, spare.layout, spare.speeds)
        gain = best_s / fleet.best_time() - 1
        if gain < self._rules.least_gain:
            return
        instead = f"with the spare {spare.replica} in its place" if spare else "without it"
        reason = (
            f"replica {name} computes at {self._relative(name):.2f} of the median speed:"
            f" {instead} a step takes {1 / (1 + gain):.2f} of the time that cheaper remedies reach"
        )
        plan = replace(self._plan(fleet), joins=spare.replica if spare else "")
        yield Remedy(RemedyKind.DRAIN, name, gain, 0.0, reason, plan)

    # --- plans ----------------------------------------------------------------------------------------

    def _plan(self, fleet: _Fleet) -> AdaptationPlan:
        shares = fleet.shares()
        entries = (ReplicaPlan(name, layout, shares[name]) for name, layout in fleet.layouts.items())
        return AdaptationPlan(tuple(entries))


_LAYOUT_KINDS = (RemedyKind.REPARTITION, RemedyKind.EXCLUSION)


def _layout_reason(replica: ReplicaHealth, kind: RemedyKind, target: StageLayout, gain: float) -> str:
    outcome = f"a step then takes {1 / (1 + gain):.2f} of its time"
    if kind is RemedyKind.REPARTITION:
        speeds = replica.layout.stage_speeds(replica.speeds)
        slowest = min(range(len(speeds)), key=lambda stage: speeds[stage])
        before, after = ("+".join(map(str, layout.layers)) for layout in (replica.layout, target))
        return (
            f"stage {slowest} of replica {replica.replica} computes at"
            f" {speeds[slowest] / max(speeds):.2f} of the fastest stage:"
            f" with the layers {after} and not {before} {outcome}"
        )
    sizes = "+".join(str(len(group)) for group in target.groups)
    before = "+".join(str(len(group)) for group in replica.layout.groups)
    return (
        f"a rank of replica {replica.replica} is dead or slow:"
        f" with groups of {sizes} and not {before} ranks {outcome}"
    )
