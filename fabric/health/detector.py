"""Detectors that take observed times: of one unit, or of the replicas of a job.

Only time spent computing counts. The caller leaves out steps with an evaluation, a snapshot, a join or
announced work of the user (`session.busy`), and takes out the time that a unit waited for others.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from fabric.health.alarm import CusumAlarm
from fabric.health.localise import SLOW, Scope, Slowdown, Unit, localise
from fabric.health.predictor import WARM_UP, Sample, WorkPredictor
from fabric.health.work import WorkAmount, is_time

RECENT = 5  # number of samples whose median is the present slowness; a median ignores two outliers
SPEED_SAMPLES = 15  # number of samples whose median is a measured speed; odd, so that the median is a sample
# The least factor for a replica that was slow from its first step: hardware may differ a little.
ALWAYS_SLOW = 1.25
MOST_MODELS = 16  # replicas whose models give the usual time; a job of thousands of replicas need not ask all
MOST_BEHIND = 50  # a comparison does not wait for a replica whose newest report is older by this many steps
FIRST_STEPS = 3  # first steps of a process, which do not count: the process compiles kernels and fills caches
SETTLED = 5  # number of successive estimates that must agree; each is a median over as many steps
AGREES = 1.1  # estimates agree if the largest is at most this many times the smallest
MOST_WAITED = 15  # after this number of estimates a speed that keeps changing counts as settled, too


class UnitDetector:
    """Predicts one unit's times and says whether it got slow."""

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.predictor = WorkPredictor(warm_up)
        self.alarm = CusumAlarm()
        self._recent: deque[float] = deque(maxlen=RECENT)  # observed over predicted time, newest samples
        # Iterations since the alarm's statistic left zero; learnt only when the statistic returns to zero.
        self._doubtful: list[Sequence[Sample]] = []

    @property
    def ratio(self) -> float | None:
        """The observed time over the predicted time, now; None without enough samples."""
        return median(self._recent) if len(self._recent) > RECENT // 2 else None

    @property
    def is_slow(self) -> bool:
        """Whether the alarm is raised and most of the recent samples are slow."""
        return self.alarm.is_raised and (self.ratio or 1.0) > SLOW

    def observe(self, samples: Sequence[Sample]) -> None:
        """Take the micro-batches of one step; impossible samples do not count."""
        pairs = [
            (work, seconds, self.predictor.predict(work)) for work, seconds in samples if is_time(seconds)
        ]
        usable = [(seconds, predicted) for _, seconds, predicted in pairs if predicted is not None]
        if not usable:
            self.predictor.learn(samples)
            return
        observed, predicted = sum(seconds for seconds, _ in usable), sum(expected for _, expected in usable)
        self.alarm.observe(observed, predicted)
        self._recent.append(observed / predicted)
        self._learn(samples)

    def _learn(self, samples: Sequence[Sample]) -> None:
        """Learn samples that certainly show no fault: while the statistic is above zero, samples wait."""
        if self.alarm.is_raised:
            self._doubtful.clear()
        elif self.alarm.statistic > 0:
            self._doubtful.append(samples)
        else:
            for iteration in [*self._doubtful, samples]:
                self.predictor.learn(iteration)
            self._doubtful.clear()


def usual_time(units: Iterable[UnitDetector], work: WorkAmount) -> float | None:
    """The median of the times that the models of some units predict for this work."""
    predicted = [unit.predictor.predict(work) for unit in islice(units, MOST_MODELS)]
    times = [seconds for seconds in predicted if seconds is not None]
    return median(times) if times else None


class Settling:
    """The successive estimates of one speed since it changed, one for each step.

    Says when they have settled: the first values still contain times from before the change.
    """

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=SETTLED)
        self._waited = 0  # number of estimates since the newest ones last agreed

    @property
    def is_settled(self) -> bool:
        """Whether the newest estimate may be acted upon."""
        return self._agree() or self._waited >= MOST_WAITED

    def observe(self, estimate: float) -> None:
        """Take the estimate, which is above zero, after one more step."""
        self._newest.append(estimate)
        self._waited = 0 if self._agree() else self._waited + 1

    def _agree(self) -> bool:
        return len(self._newest) == SETTLED and max(self._newest) <= AGREES * min(self._newest)


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """The measured speed of one replica."""

    replica: str
    ratio: float | None  # observed over predicted time, by the replica's own past
    relative: float | None  # its time over the median of the times that all replicas' models predict
    seconds: float  # seconds of computing in the replica's newest step
    predicted_s: float | None
    is_slow: bool
    note: str  # why the declared work is not used, or empty
    is_settled: bool = True  # whether ``relative`` no longer contains times from before a slowdown

    @property
    def speed(self) -> float:
        """The speed relative to the median replica: 0.5 is half as fast; 1 where no speed is known."""
        return 1.0 / self.relative if self.relative is not None else 1.0


class _Replica:
    """The detector's memory of one process of a replica."""

    def __init__(self, replica: str, incarnation: int) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.unit = UnitDetector()
        self.step = -1
        self.skip = FIRST_STEPS
        self.newest: tuple[WorkAmount, float] | None = None
        self.predicted_s: float | None = None
        self.relative: deque[tuple[int, float]] = deque(maxlen=2 * SPEED_SAMPLES)  # by step
        self.ratios: deque[tuple[int, float]] = deque(maxlen=2 * SPEED_SAMPLES)
        self.settling: Settling | None = None  # of the relative time; None while the replica is not slow

    @property
    def relative_time(self) -> float | None:
        """The relative time now. The older samples of a slowed replica show its speed before."""
        return _newest(self.relative, RECENT if self.unit.is_slow else SPEED_SAMPLES, RECENT)

    def settle(self) -> None:
        """Take the newest relative time, if the replica is slow."""
        if not self.unit.is_slow:
            self.settling = None
            return
        self.settling = self.settling or Settling()
        relative = self.relative_time
        if relative is not None:
            self.settling.observe(relative)

    def forget(self) -> None:
        """Drop all values that are kept by step, because the steps begin again."""
        self.relative.clear()
        self.ratios.clear()


class JobDetector:
    """Watches the replicas of one job, each as one unit."""

    def __init__(self, floor_s: float = 0.0) -> None:
        self._floor_s = floor_s  # a replica that makes a step longer by less than this is not reported
        self._replicas: dict[str, _Replica] = {}

    def observe(self, replica: str, incarnation: int, step: int, work: WorkAmount, seconds: float) -> None:
        """Take the report of one step; a repeated or an impossible report does not count.

        Steps may go back, when the job begins from an older state.
        """
        watched = self._replicas.get(replica)
        if watched is None or watched.incarnation != incarnation:
            watched = self._replicas[replica] = _Replica(replica, incarnation)
        if step < watched.step:
            watched.forget()
        if step == watched.step or not work.is_valid or not is_time(seconds):
            return
        watched.step = step
        if watched.skip > 0:
            watched.skip -= 1
            return
        watched.predicted_s = watched.unit.predictor.predict(work)
        watched.newest = (work, seconds)
        expected = usual_time((x.unit for x in self._replicas.values()), work)
        if expected is not None:
            watched.relative.append((step, seconds / expected))
        if watched.predicted_s is not None:
            watched.ratios.append((step, seconds / watched.predicted_s))
        was_slow = watched.unit.is_slow
        watched.unit.observe([(work, seconds)])
        if watched.unit.is_slow != was_slow:  # older samples show the speed before the change
            watched.relative = deque(list(watched.relative)[-RECENT:], watched.relative.maxlen)
        watched.settle()

    def is_alarmed(self, replica: str) -> bool:
        """Whether this replica is slow by its own past."""
        watched = self._replicas.get(replica)
        return watched is not None and watched.unit.is_slow

    def keep(self, members: Mapping[str, int]) -> None:
        """Forget the processes that are not in ``members`` (replica -> incarnation)."""
        gone = [name for name, watched in self._replicas.items() if members.get(name) != watched.incarnation]
        for name in gone:
            del self._replicas[name]

    def speeds(self) -> list[ReplicaSpeed]:
        """Every replica that has reported, by name."""
        return [
            self._speed(name, watched) for name, watched in sorted(self._replicas.items()) if watched.newest
        ]

    def relative_times(self) -> dict[str, list[tuple[int, float]]]:
        """By replica, the newest times over the times that all replicas' models predict, with their steps."""
        return {name: list(watched.relative) for name, watched in sorted(self._replicas.items())}

    def notes(self) -> dict[str, str]:
        """Why the declared work of a replica is not used, by replica."""
        units = {name: watched.unit for name, watched in sorted(self._replicas.items())}
        return {name: unit.predictor.note for name, unit in units.items() if unit.predictor.note}

    def _speed(self, name: str, watched: _Replica) -> ReplicaSpeed:
        assert watched.newest is not None
        unit = watched.unit
        return ReplicaSpeed(
            replica=name,
            ratio=unit.ratio,
            relative=watched.relative_time,
            seconds=watched.newest[1],
            predicted_s=watched.predicted_s,
            is_slow=unit.is_slow,
            note=unit.predictor.note,
            is_settled=watched.settling is None or watched.settling.is_settled,
        )

    def slowdowns(self, failed: Collection[str] = ()) -> list[Slowdown]:
        """The slow replicas, or the whole job. ``failed`` replicas are left out of the comparison."""
        speeds = {x.replica: x for x in self.speeds() if x.replica not in failed}
        replicas = [self._replicas[name] for name in speeds]
        until = self._same_step(replicas)
        newest = {Unit(x.replica): _newest(x.ratios, RECENT, RECENT // 2 + 1, until) for x in replicas}
        ratios = {unit: ratio for unit, ratio in newest.items() if ratio is not None}
        changed = [x for x in localise(ratios) if self._is_alarmed(x, speeds)]
        if any(slowdown.scope is Scope.JOB for slowdown in changed):
            return changed
        accused = {slowdown.replica for slowdown in changed}
        changed += [x for x in self._since_they_came(replicas, until) if x.replica not in accused]
        return [x for x in changed if self._cost_s(speeds[x.replica], x.factor) >= self._floor_s]

    @staticmethod
    def _same_step(replicas: Sequence[_Replica]) -> int:
        """The newest step that all have reported; later steps would accuse the first reporter of a slow
        job."""
        steps = [watched.step for watched in replicas if watched.ratios]
        newest = max(steps, default=0)
        return min((step for step in steps if step > newest - MOST_BEHIND), default=0)

    @staticmethod
    def _is_alarmed(slowdown: Slowdown, speeds: Mapping[str, ReplicaSpeed]) -> bool:
        """Whether the slow unit has an alarm; for the whole job, whether most of the replicas have."""
        if slowdown.scope is Scope.JOB:
            return 2 * sum(x.is_slow for x in speeds.values()) > len(speeds)
        return speeds[slowdown.replica].is_slow

    @staticmethod
    def _cost_s(speed: ReplicaSpeed, factor: float) -> float:
        """The seconds by which the slowness makes the replica's newest step longer."""
        return speed.seconds * (1.0 - 1.0 / factor)

    @staticmethod
    def _since_they_came(replicas: Sequence[_Replica], until: int) -> list[Slowdown]:
        """Compare replicas: the model of one that was slow from its first step has learnt slow times."""
        samples = {x.replica: _newest(x.relative, SPEED_SAMPLES, SPEED_SAMPLES, until) for x in replicas}
        relative = {replica: value for replica, value in samples.items() if value is not None}
        slowdowns = []
        usual = median(list(relative.values())) if relative else 1.0
        for replica, own in relative.items():
            if own <= SLOW * usual:
                continue
            others = [value for other, value in relative.items() if other != replica]
            factor = own / median(others) if others else 1.0
            if factor > ALWAYS_SLOW:
                evidence = (
                    f"replica {replica} takes {factor:.2f} times as long as its equals for the same work "
                    f"({len(others)} others compared)"
                )
                slowdowns.append(Slowdown(Scope.REPLICA, (Unit(replica),), factor, evidence))
        return slowdowns


def _newest(
    values: Sequence[tuple[int, float]], samples: int, at_least: int, until: int | None = None
) -> float | None:
    """The median of the newest ``samples`` values up to step ``until``; None with fewer than ``at_least``."""
    newest = [value for step, value in values if until is None or step <= until][-samples:]
    return median(newest) if len(newest) >= at_least else None
