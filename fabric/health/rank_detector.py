"""Say which rank, stage or link makes a replica of several ranks slow, from its ranks' own computing times.

The ranks of a replica wait for each other, so all of them take as long as the slowest. Only their times
without these waits tell them apart. Where a wait cannot be measured (on a CUDA device), all ranks of a slow
replica look slow, and the replica stays the accused. The work per report grows with the ranks of one replica,
so a job of many ranks is not watched by rank.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median

from fabric.health.detector import (
    FIRST_STEPS,
    MOST_MODELS,
    RECENT,
    ReplicaSpeed,
    UnitDetector,
)
from fabric.health.localise import SLOW, Scope, Slowdown, Unit, localise
from fabric.health.work import WorkAmount, is_time
from fabric.model import Member, RankTimes

# A rank explains a slow replica if its own extra time is at least this share of the replica's extra time.
EXPLAINS = 0.25


@dataclass(frozen=True, slots=True)
class RankReport:
    """The times of all ranks of one replica in one step."""

    replica: str
    incarnation: int
    step: int
    work: WorkAmount  # work of rank 0
    ranks: Sequence[RankTimes]


@dataclass(slots=True)
class RankHistory:
    """The times of one rank in the newest steps, and its models."""

    number: int  # rank within the replica
    detector: UnitDetector = field(default_factory=UnitDetector)
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class _RankedReplica:
    """One process of a replica of several ranks."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.step = -1
        self.skip = FIRST_STEPS
        self.ranks: dict[Unit, RankHistory] = {}
        self.usual_wait_s: float | None = None  # mean wait of a rank in a step, while the replica is well

    @property
    def wait_s(self) -> float:
        """The mean over the ranks of the median of their newest waits."""
        waits = [median(rank.waited_s) for rank in self.ranks.values() if rank.waited_s]
        return sum(waits) / len(waits) if waits else 0.0


class RankDetector:
    """Watches at most ``most`` ranks of a job, each as one unit; a job of more is compared by replicas."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[str, int] = {}  # ranks of the watched replicas
        self._replicas: dict[str, _RankedReplica] = {}
        self._by_stage: dict[int, dict[Unit, RankHistory]] = {}

    def keep(self, roster: Sequence[Member]) -> None:
        """Forget replicas outside ``roster``, and all where the roster has too many ranks."""
        sizes = {member.replica: 1 + len(member.ranks) for member in roster}
        self._sizes = sizes if sum(sizes.values()) <= self._most else {}
        for name in set(self._replicas) - set(self._sizes):
            self._forget(name)

    def observe(self, report: RankReport, is_well: bool) -> None:
        """Take the ranks of one replica's step. ``is_well``: whether the replica is not slow at present.

        Impossible times and work do not count, and no report with another number of ranks than expected.
        """
        name, step = report.replica, report.step
        if self._sizes.get(name) != len(report.ranks):
            return
        watched = self._replicas.get(name)
        if watched is None or watched.incarnation != report.incarnation:
            self._forget(name)
            watched = self._replicas[name] = _RankedReplica(report.incarnation)
        if step == watched.step:
            return
        if step < watched.step:  # the job begins from an older state
            for rank in watched.ranks.values():
                rank.detector.relative.clear()
        watched.step = step
        if watched.skip > 0:
            watched.skip -= 1
            return
        places: dict[int, int] = {}
        for number, times in enumerate(report.ranks):
            place = places[times.stage] = places.get(times.stage, -1) + 1
            work = replace(report.work, tokens=times.tokens, squares=times.squares)
            if work.is_valid and is_time(times.compute_s):
                unit = Unit(name, times.stage, place)
                if unit not in watched.ranks:
                    watched.ranks[unit] = RankHistory(number)
                    self._by_stage.setdefault(unit.stage, {})[unit] = watched.ranks[unit]
                rank, equals = watched.ranks[unit], self._by_stage[unit.stage].values()
                rank.waited_s.append(times.waited_s)
                rank.detector.take(step, work, times.compute_s, (x.detector for x in equals))
        if is_well and watched.ranks:
            usual = watched.usual_wait_s
            watched.usual_wait_s = watched.wait_s if usual is None else 0.95 * usual + 0.05 * watched.wait_s

    def _forget(self, name: str) -> None:
        watched = self._replicas.pop(name, None)
        for unit in watched.ranks if watched is not None else ():
            del self._by_stage[unit.stage][unit]

    # --- what the ranks show ------------------------------------------------------------------------------

    def histories(self, *replicas: str) -> list[tuple[Unit, RankHistory]]:
        """The ranks with at least one sample, of ``replicas`` or else of all."""
        names = [x for x in replicas or sorted(self._replicas) if x in self._replicas]
        return [history for name in names for history in sorted(self._replicas[name].ranks.items())]

    def numbers(self, slowdown: Slowdown) -> list[int]:
        """The slow ranks of the replica; empty where the replica as a whole is slow."""
        return sorted(rank.number for rank in self._accused(slowdown))

    def speeds_of(self, slowdown: Slowdown) -> dict[int, float]:
        """Each slow rank's speed relative to its own past; empty where no rank computes slowly."""
        ranks = self._accused(slowdown) if slowdown.scope is not Scope.LINK else []
        return {x.number: 1.0 / ratio for x in ranks if (ratio := x.detector.ratio) is not None}

    def _accused(self, slowdown: Slowdown) -> list[RankHistory]:
        if slowdown.scope not in (Scope.RANK, Scope.STAGE, Scope.LINK):
            return []
        histories = dict(self.histories(slowdown.replica))
        return [histories[unit] for unit in slowdown.units if unit in histories]

    def stages_of(self, replica: str) -> tuple[int, ...]:
        """The pipeline stage of each rank; empty where the ranks are not watched."""
        stages = {rank.number: unit.stage for unit, rank in self.histories(replica)}
        return tuple(stages[number] for number in sorted(stages))

    # --- which part is slow -------------------------------------------------------------------------------

    def locate(self, slowdowns: Sequence[Slowdown], speeds: Sequence[ReplicaSpeed]) -> list[Slowdown]:
        """The same slowdowns, with the slow rank, stage or link where the ranks' times tell it."""
        seconds = {x.replica: x.seconds for x in speeds}
        located = []
        for slowdown in slowdowns:
            asked = slowdown
            if slowdown.scope is Scope.JOB and len(speeds) == 1:
                asked = replace(slowdown, scope=Scope.REPLICA, units=(Unit(speeds[0].replica),))
            part = self._part(asked, seconds.get(asked.replica, 0.0) * (1.0 - 1.0 / slowdown.factor))
            located.append(slowdown if part is asked else replace(part, factor=slowdown.factor))
        return located

    def _part(self, slowdown: Slowdown, extra_s: float) -> Slowdown:
        """Say which part of the slow replica is slow. ``extra_s``: by how much its newest step is longer.

        Return ``slowdown`` itself where the ranks do not tell.
        """
        watched = self._replicas.get(slowdown.replica)
        if watched is None or slowdown.scope is not Scope.REPLICA or len(watched.ranks) < 2:
            return slowdown
        slow: dict[Unit, float] = {}
        for unit, rank in watched.ranks.items():
            if (ratio := rank.detector.ratio) is None:
                return slowdown
            own_s = rank.detector.seconds * (1.0 - 1.0 / ratio)
            explains = ratio > SLOW and own_s >= EXPLAINS * extra_s
            slow[unit] = ratio if explains else 1.0
        if all(ratio > SLOW for ratio in slow.values()):
            return slowdown
        accused = localise({**self._equals(slowdown.replica, slow), **slow})
        inside = [x for x in accused if x.scope in (Scope.RANK, Scope.STAGE) and x.units[0] in slow]
        if inside:
            return inside[0]
        return self._link(watched, slowdown, extra_s)

    def _equals(self, replica: str, units: Mapping[Unit, float]) -> dict[Unit, float]:
        """The ranks of other replicas with which those of ``replica`` are compared."""
        others: dict[Unit, float] = {}
        for stage in {unit.stage for unit in units}:
            for unit, rank in islice(self._by_stage[stage].items(), MOST_MODELS * len(units)):
                if unit.replica != replica and (ratio := rank.detector.ratio) is not None:
                    others[unit] = ratio
        return others

    @staticmethod
    def _link(watched: _RankedReplica, slowdown: Slowdown, extra_s: float) -> Slowdown:
        """Accuse the links between the ranks, where the ranks wait for each other and compute as usual."""
        usual_s, wait_s = watched.usual_wait_s, watched.wait_s
        if usual_s is None or wait_s - usual_s < 0.5 * extra_s:
            return slowdown
        evidence = (
            f"the links between the ranks of replica {slowdown.replica} are slow: no rank computes slowly, "
            f"and a rank waits {wait_s:.3f} s in each step for the others, usually {usual_s:.3f} s"
        )
        return Slowdown(Scope.LINK, tuple(sorted(watched.ranks)), slowdown.factor, evidence)
