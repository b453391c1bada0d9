"""Say which rank, stage or link makes a replica of several ranks slow, from its ranks' own computing times.

The ranks of a replica wait for each other, so all of them take as long as the slowest. Only their times
without these waits tell them apart. Where a wait cannot be measured (on a CUDA device), all ranks of a slow
replica look slow, and the replica stays the accused.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from fabric.health.detector import FIRST_STEPS, MOST_MODELS, RECENT, SPEED_SAMPLES, UnitDetector, usual_time
from fabric.health.localise import SLOW, Scope, Slowdown, Unit, localise
from fabric.health.work import WorkAmount, is_time

KEPT_STEPS = 30  # newest steps whose times are kept for each rank
# A rank explains a slow replica if its own extra time is at least this share of the replica's extra time.
EXPLAINS = 0.25


@dataclass(frozen=True, slots=True)
class RankSample:
    """One rank's part of one step."""

    unit: Unit
    number: int  # rank within the replica
    work: WorkAmount
    seconds: float  # seconds of computing, without waits
    waited_s: float


@dataclass(slots=True)
class RankHistory:
    """The times of one rank in the newest steps, and its models."""

    number: int  # rank within the replica
    detector: UnitDetector
    seconds: float = 0.0  # of the newest step
    predicted_s: float | None = None
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # observed over predicted
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    # By step, the rank's time over the median of the times that the models of its equals predict.
    relative: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    @property
    def ratio(self) -> float | None:
        """The observed time over the predicted time, now; None without enough samples."""
        return median(self.ratios) if len(self.ratios) > RECENT // 2 else None

    @property
    def speed(self) -> float | None:
        """The speed over several steps, relative to the equals' speed; None without enough samples."""
        samples = RECENT if self.detector.is_slow else SPEED_SAMPLES
        newest = [time for _, time in self.relative][-samples:]
        return 1.0 / median(newest) if len(newest) >= RECENT else None


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
    """Watches the ranks of a job's replicas, each rank as one unit."""

    def __init__(self) -> None:
        self._replicas: dict[str, _RankedReplica] = {}
        self._by_stage: dict[int, dict[Unit, RankHistory]] = {}

    def observe(self, incarnation: int, step: int, samples: Sequence[RankSample], is_well: bool) -> None:
        """Take the ranks of one replica's step. ``is_well``: whether the replica is not slow at present."""
        name = samples[0].unit.replica
        watched = self._replicas.get(name)
        if watched is None or watched.incarnation != incarnation:
            self._forget(name)
            watched = self._replicas[name] = _RankedReplica(incarnation)
        if step == watched.step:
            return
        if step < watched.step:  # the job begins from an older state
            for rank in watched.ranks.values():
                rank.relative.clear()
        watched.step = step
        if watched.skip > 0:
            watched.skip -= 1
            return
        for sample in samples:
            if sample.work.is_valid and is_time(sample.seconds):
                self._take(watched, step, sample)
        if is_well and watched.ranks:
            usual = watched.usual_wait_s
            watched.usual_wait_s = watched.wait_s if usual is None else 0.95 * usual + 0.05 * watched.wait_s

    def _take(self, watched: _RankedReplica, step: int, sample: RankSample) -> None:
        rank = watched.ranks.get(sample.unit)
        if rank is None:
            rank = watched.ranks[sample.unit] = RankHistory(sample.number, UnitDetector())
            self._by_stage.setdefault(sample.unit.stage, {})[sample.unit] = rank
        rank.seconds, rank.predicted_s = sample.seconds, rank.detector.predictor.predict(sample.work)
        rank.waited_s.append(sample.waited_s)
        if rank.predicted_s is not None:
            rank.ratios.append(sample.seconds / rank.predicted_s)
        expected = usual_time((x.detector for x in self._by_stage[sample.unit.stage].values()), sample.work)
        if expected is not None:
            rank.relative.append((step, sample.seconds / expected))
        rank.detector.observe([(sample.work, sample.seconds)])

    def keep(self, members: Collection[str]) -> None:
        """Forget the replicas that are not in ``members``."""
        for name in set(self._replicas) - set(members):
            self._forget(name)

    def _forget(self, name: str) -> None:
        watched = self._replicas.pop(name, None)
        for unit in watched.ranks if watched is not None else ():
            del self._by_stage[unit.stage][unit]

    def histories(self) -> Iterable[tuple[Unit, RankHistory]]:
        """All ranks with at least one sample."""
        for name in sorted(self._replicas):
            yield from self.histories_of(name)

    def histories_of(self, replica: str) -> Iterable[tuple[Unit, RankHistory]]:
        """The ranks of one replica."""
        watched = self._replicas.get(replica)
        return sorted(watched.ranks.items()) if watched is not None else []

    def locate(self, slowdown: Slowdown, extra_s: float) -> Slowdown:
        """Say which part of the slow replica is slow. ``extra_s``: by how much its newest step is longer.

        Return ``slowdown`` itself where the ranks do not tell.
        """
        watched = self._replicas.get(slowdown.replica)
        if watched is None or slowdown.scope is not Scope.REPLICA or len(watched.ranks) < 2:
            return slowdown
        ratios = {unit: rank.ratio for unit, rank in watched.ranks.items()}
        if any(ratio is None for ratio in ratios.values()):
            return slowdown
        slow = {
            unit: ratio if self._explains(watched.ranks[unit], ratio, extra_s) else 1.0
            for unit, ratio in ratios.items()
            if ratio is not None
        }
        if all(ratio > SLOW for ratio in slow.values()):
            return slowdown
        accused = localise({**self._equals(slowdown.replica, slow), **slow})
        inside = [x for x in accused if x.scope in (Scope.RANK, Scope.STAGE) and x.units[0] in slow]
        if inside:
            return inside[0]
        return self._link(watched, slowdown, extra_s)

    @staticmethod
    def _explains(rank: RankHistory, ratio: float, extra_s: float) -> bool:
        return ratio > SLOW and rank.seconds * (1.0 - 1.0 / ratio) >= EXPLAINS * extra_s

    def _equals(self, replica: str, units: Mapping[Unit, float]) -> dict[Unit, float]:
        """The ranks of other replicas with which those of ``replica`` are compared."""
        others: dict[Unit, float] = {}
        for stage in {unit.stage for unit in units}:
            for unit, rank in islice(self._by_stage[stage].items(), MOST_MODELS * len(units)):
                if unit.replica != replica and (ratio := rank.ratio) is not None:
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
