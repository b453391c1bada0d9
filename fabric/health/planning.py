"""Plan what to do about a slow replica: the remedies, cheapest first, each with its gain, cost and reason.

The planner compares step times under the shares that each arrangement allows. A remedy's gain is what it adds
to the gain of the cheaper remedies. A remedy that gains less than the threshold or does not pay back its cost
is not proposed. Only ratios of speeds count: when all replicas are equally slow, nothing is proposed.

A speed is a throughput. Pure: values in, values out.
"""

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec.structs import replace

from fabric.model import Value, apportion

# The fastest speed as an integer: integers divide exactly, and equally on every host.
_UNIT = 1 << 40


def micro_batch_shares(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` micro-batches in proportion to ``speeds``, by the largest remainder; ties go to the
    first.

    Each replica gets at least one, so that its speed stays measured. Raises ValueError where ``total`` is too
    small for that.
    """
    if len(speeds) > total:
        raise ValueError(f"{total} micro-batches are too few for {len(speeds)} replicas: use fewer replicas")
    able, shares = list(range(len(speeds))), [1] * len(speeds)
    while able:
        rest, weight = total - len(speeds) + len(able), math.fsum(speeds[place] for place in able)
        small = [place for place in able if rest * speeds[place] / weight < 1]
        if not small:
            fastest = max(speeds)
            parts = apportion(rest, [round(speeds[place] / fastest * _UNIT) for place in able])
            for place, part in zip(able, parts, strict=True):
                shares[place] = part
            break
        # The slowest replica gets its one first, which leaves fewer micro-batches for the others.
        able.remove(min(small, key=lambda place: (speeds[place], place)))
    return tuple(shares)


def cut_layers(layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Cut ``layers`` equal layers into stages, at least 1 each, with the smallest slowest stage.

    The slowest stage has max(l_s / v_s). Greedy: the next layer goes to the stage with the smallest (l_s + 1)
    / v_s, ties to the first. For equal layers no cut is better. Raises ValueError for too few layers.
    """
    if layers < len(speeds):
        raise ValueError(
            f"{layers} layers cannot be cut into {len(speeds)} stages: use at most {layers} stages"
        )
    cut = [1] * len(speeds)
    queue = [(2 / speed, stage) for stage, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(layers - len(speeds)):
        stage = queue[0][1]
        cut[stage] += 1
        heapq.heapreplace(queue, ((cut[stage] + 1) / speeds[stage], stage))
    return tuple(cut)


def select_group(speeds: Sequence[float], sizes: Iterable[int]) -> tuple[int, ...]:
    """Choose the k fastest ranks for which k * min(speed) is largest; ties go to the smaller k.

    ``sizes``: the numbers of ranks that the model allows, all up to those that there are.
    """
    fastest = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
    best = max(sizes, key=lambda size: (size * speeds[fastest[size - 1]], -size))
    return tuple(sorted(fastest[:best]))


class StageLayout(Value):
    """The stages of one replica. A replica without a pipeline has one stage."""

    groups: tuple[tuple[int, ...], ...]  # stage -> the ranks that work there
    layers: tuple[int, ...]  # stage -> its layers

    def stage_speeds(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Stage -> k times its slowest rank's speed."""
        return tuple(len(group) * min(speeds[rank] for rank in group) for group in self.groups)

    def stage_times(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Stage -> the time of a micro-batch, l_s / v_s."""
        stages = zip(self.layers, self.stage_speeds(speeds), strict=True)
        return tuple(layers / speed for layers, speed in stages)

    def step_time(self, micro_batches: int, speeds: Sequence[float]) -> float:
        """The time of a step: one micro-batch goes through all stages, the others follow the slowest stage.

        For equal stages this is the makespan of 1F1B, for unequal ones an upper bound of it.
        """
        if micro_batches == 0:
            return 0.0
        times = self.stage_times(speeds)
        return math.fsum(times) + (micro_batches - 1) * max(times)


class ModelCut(Value):
    """The layouts into which the script of the slow replica can cut the model."""

    sizes: tuple[int, ...] = ()  # other numbers of ranks that a replica of one stage may have
    can_repartition: bool = False  # whether the script can build other splits of the layers


class ReplicaHealth(Value):
    """The planner's knowledge of one replica: its layout and its measured speeds."""

    replica: str
    layout: StageLayout  # the layout in force, which is the usual one: another one gets no advice
    speeds: tuple[float, ...]  # rank -> throughput relative to a healthy rank
    micro_batches: int  # micro-batches per step at present; 0: a spare, which stands by

    @property
    def is_measured(self) -> bool:
        """Whether each rank of the layout has a speed from which a time follows."""
        ranks = [rank for group in self.layout.groups for rank in group]
        return max(ranks) < len(self.speeds) and all(math.isfinite(x) and x > 0 for x in self.speeds)


class RemedyKind(StrEnum):
    """The kinds of remedies, cheapest first."""

    SHARES = "shares"  # other micro-batches per replica: one write of the record, in force from the next step
    REPARTITION = "repartition"  # one replica comes back with another split of its layers
    EXCLUSION = "exclusion"  # one replica comes back with fewer ranks
    DRAIN = "drain"  # one replica leaves; a spare takes its place where a spare exists


LEAST_GAIN = 0.05  # the least gain of throughput, as a share, for which a remedy is proposed
HYSTERESIS = 0.03  # two speeds count as equal if they differ by less than this share
REJOIN_S = 60.0  # how long a replica that changes its layout is away
HORIZON_S = 3600.0  # a remedy must gain back its cost within this many seconds


class Remedy(Value):
    """One action, and why."""

    kind: RemedyKind
    replica: str  # the replica that the remedy is for
    gain: float  # throughput gained beyond the cheaper remedies, as a share
    cost_s: float  # time that the job loses by the change
    reason: str  # the reason for the remedy in one sentence
    shares: Mapping[str, int]  # replica -> micro-batches per step, once the remedy is in force
    layout: StageLayout | None = None  # the new layout of the replica
    joins: str = ""  # the spare that takes the place of a drained replica


def propose(
    total: int, replicas: Sequence[ReplicaHealth], cut: ModelCut, spares: Sequence[ReplicaHealth] = ()
) -> tuple[Remedy, ...]:
    """Plan the remedies for a job of ``total`` micro-batches, cheapest first; none for a job that cannot be
    planned."""
    if not replicas or not all(replica.is_measured for replica in (*replicas, *spares)):
        return ()
    fleet, spare = _Fleet(total, {replica.replica: replica for replica in replicas}), next(iter(spares), None)
    try:
        best_s = fleet.best_time()
        remedies = [fleet.other_shares()]
        for replica in replicas:
            change = fleet.repartition(replica, cut) or fleet.exclusion(replica, cut)
            remedies += [change, fleet.drain(replica, best_s / (1 + (change.gain if change else 0)), spare)]
    except ValueError:
        return ()
    order = list(RemedyKind)
    possible = [remedy for remedy in remedies if remedy is not None]
    return tuple(sorted(possible, key=lambda x: (order.index(x.kind), -x.gain, x.replica)))


class _Fleet(Value):
    """The replicas that take part in steps, by name, each in one layout."""

    total: int  # total number of micro-batches
    replicas: Mapping[str, ReplicaHealth]

    def capacity(self, name: str) -> float:
        """Micro-batches per time at the slowest stage."""
        replica = self.replicas[name]
        return 1 / max(replica.layout.stage_times(replica.speeds))

    def level_capacities(self) -> dict[str, float]:
        """The capacities; a capacity near the median counts as the median, so that noise changes nothing."""
        capacities = {name: self.capacity(name) for name in self.replicas}
        middle = statistics.median(capacities.values())
        return {
            name: middle if abs(capacity / middle - 1) <= HYSTERESIS else capacity
            for name, capacity in capacities.items()
        }

    def shares(self) -> dict[str, int]:
        """Replica -> micro-batches, in proportion to the capacities."""
        capacities = self.level_capacities()
        return dict(zip(capacities, micro_batch_shares(self.total, list(capacities.values())), strict=True))

    def step_time(self, shares: Mapping[str, int]) -> float:
        replicas = self.replicas
        return max(replicas[x].layout.step_time(n, replicas[x].speeds) for x, n in shares.items())

    def best_time(self) -> float:
        """The time of a step with the best shares; inf where no replica is left."""
        return self.step_time(self.shares()) if self.replicas else math.inf

    def without(self, replica: str, instead: ReplicaHealth | None = None) -> "_Fleet":
        others = {name: x for name, x in self.replicas.items() if name != replica}
        return replace(self, replicas=others if instead is None else {**others, instead.replica: instead})

    def other_shares(self) -> Remedy | None:
        target = self.shares()
        current = {name: replica.micro_batches for name, replica in self.replicas.items()}
        now_s, best_s = self.step_time(current), self.step_time(target)
        gain = now_s / best_s - 1
        is_even = len(set(self.level_capacities().values())) == 1
        if is_even or gain < LEAST_GAIN or target == current:
            return None
        slowest = min(self.replicas, key=self.capacity)
        reason = (
            f"replica {slowest} computes at {self._relative(slowest):.2f} of the median speed:"
            f" with {target[slowest]} and not {current[slowest]} micro-batches a step takes"
            f" {best_s / now_s:.2f} of its time"
        )
        return Remedy(RemedyKind.SHARES, slowest, gain, 0.0, reason, target)

    def _relative(self, replica: str) -> float:
        return self.capacity(replica) / statistics.median(map(self.capacity, self.replicas))

    def repartition(self, replica: ReplicaHealth, cut: ModelCut) -> Remedy | None:
        """Another split of the layers, in proportion to the speeds of the stages."""
        layout, speeds = replica.layout, replica.layout.stage_speeds(replica.speeds)
        per_rank = [speed / len(group) for speed, group in zip(speeds, layout.groups, strict=True)]
        if not cut.can_repartition or len(speeds) == 1 or _is_even(per_rank):
            return None
        target = replace(layout, layers=cut_layers(sum(layout.layers), speeds))
        slowest = min(range(len(speeds)), key=lambda stage: speeds[stage])
        before, after = ("+".join(map(str, x.layers)) for x in (layout, target))
        reason = (
            f"stage {slowest} of replica {replica.replica} computes at"
            f" {speeds[slowest] / max(speeds):.2f} of the fastest stage:"
            f" with the layers {after} and not {before}"
        )
        return self._change(RemedyKind.REPARTITION, replica, target, reason)

    def exclusion(self, replica: ReplicaHealth, cut: ModelCut) -> Remedy | None:
        """Fewer ranks, without the slowest. A pipeline keeps its ranks."""
        layout = replica.layout
        if not cut.sizes or len(layout.groups) > 1 or _is_even(replica.speeds):
            return None
        ranks = len(replica.speeds)
        group = select_group(replica.speeds, {*(k for k in cut.sizes if k <= ranks), ranks})
        reason = (
            f"a rank of replica {replica.replica} is slow: with groups of {len(group)} and not {ranks} ranks"
        )
        return self._change(RemedyKind.EXCLUSION, replica, replace(layout, groups=(group,)), reason)

    def _change(
        self, kind: RemedyKind, replica: ReplicaHealth, target: StageLayout, reason: str
    ) -> Remedy | None:
        """Another layout for a replica, which costs one rejoin; None where it gains too little."""
        fleet, best_s = self.without(replica.replica, replace(replica, layout=target)), self.best_time()
        gain = best_s / fleet.best_time() - 1
        cost_s = REJOIN_S * max(0.0, 1 - best_s / self.without(replica.replica).best_time())
        if target == replica.layout or gain < LEAST_GAIN or HORIZON_S * gain / (1 + gain) < cost_s:
            return None
        reason = f"{reason} a step then takes {1 / (1 + gain):.2f} of its time"
        return Remedy(kind, replica.replica, gain, cost_s, reason, fleet.shares(), target)

    def drain(self, replica: ReplicaHealth, best_s: float, spare: ReplicaHealth | None) -> Remedy | None:
        """Without the replica. ``best_s``: the time of a step that cheaper remedies reach."""
        name, fleet = replica.replica, self.without(replica.replica, spare)
        gain = best_s / fleet.best_time() - 1
        if self._relative(name) >= 1 - HYSTERESIS or gain < LEAST_GAIN:
            return None
        instead = f"with the spare {spare.replica} in its place" if spare else "without it"
        reason = (
            f"replica {name} computes at {self._relative(name):.2f} of the median speed:"
            f" {instead} a step takes {1 / (1 + gain):.2f} of the time that cheaper remedies reach"
        )
        joins = spare.replica if spare else ""
        return Remedy(RemedyKind.DRAIN, name, gain, 0.0, reason, fleet.shares(), joins=joins)


def _is_even(speeds: Sequence[float]) -> bool:
    return max(speeds) / min(speeds) - 1 <= HYSTERESIS
