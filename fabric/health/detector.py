"""Say which replica of a job is slow, and which of its ranks, stages or links makes it slow.

Only time spent computing counts. The caller leaves out steps with an evaluation, a snapshot, a join or
announced work of the user (`session.busy`), and takes out the time that a unit waited for others.

The ranks of a replica wait for each other, so all of them take as long as the slowest. Only their times
without these waits tell them apart. Where a wait cannot be measured (on a CUDA device), all ranks of a slow
replica look slow, and the replica stays the accused. The work per report grows with the ranks of one replica,
so a job of many ranks is not watched by rank.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, islice
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.health.alarm import CusumAlarm, Row, dot, inverse, solve, spread
from fabric.health.localise import SLOW, Scope, Slowdown, Unit, localise
from fabric.health.work import WorkAmount, is_time
from fabric.model import Member, RankTimes, Value

# Predict the time of work: ``seconds = a * tokens + b * squares + c * micro_batches``.
#
# The first samples are fitted robustly and all at once (Huber weights, coefficients of zero or more).
# Later samples move the coefficients by recursive least squares with forgetting. Errors count relative to
# the prediction, so that long and short micro-batches weigh the same.


WARM_UP = 50
MOST_SAMPLES = 400  # the most samples of the first fit
FORGETTING = 0.995
ROUNDS = 15  # iterations of the robust fit
HUBER = 1.345  # threshold in standard deviations: 95 % efficient on normal errors
RIDGE = 1e-6  # keeps a fit defined where the work never varies
# A recursive fit of work that never varies grows ever more uncertain; this limit bounds the uncertainty.
MAX_UNCERTAINTY = 1e6
CLIP = 3.0  # a larger error moves the fit as if it were this many standard deviations
NOISE_FLOOR = 0.002
NOISE_GAIN = 0.02  # the weight of one sample in the estimate of the noise
VARIES = 0.02  # work that varies less cannot show whether it predicts the time
USELESS = 0.95  # the work is used if its errors are below this share of the errors of the number of samples


Sample = tuple[WorkAmount, float]  # the work of a sample, and the seconds that it took


def _declared(work: WorkAmount) -> Row:
    return [work.tokens, work.squares, float(work.micro_batches)]


def _by_samples(work: WorkAmount) -> Row:
    return [work.samples, 0.0, float(work.micro_batches)]


class LinearFit(Struct):
    """Coefficients over scaled features, and the state of the recursive fit."""

    scales: Row
    coefficients: Row
    noise: float  # relative standard deviation of the errors
    uncertainty: list[Row]  # covariance of the coefficients, before multiplication by the noise

    def predict(self, features: Row) -> float:
        return dot(self._scaled(features), self.coefficients)

    def _scaled(self, features: Row) -> Row:
        return [x / scale if scale else 0.0 for x, scale in zip(features, self.scales, strict=True)]

    def update(self, features: Row, seconds: float) -> None:
        """One step of recursive least squares."""
        predicted = self.predict(features)
        if not predicted > 0:
            return
        row = [x / predicted for x in self._scaled(features)]
        limit = CLIP * max(self.noise, NOISE_FLOOR)
        error = max(-limit, min(limit, seconds / predicted - 1.0))
        self.noise += NOISE_GAIN * (1.25 * abs(error) - self.noise)
        moved = [dot(line, row) for line in self.uncertainty]
        total = FORGETTING + dot(row, moved)
        gain = [x / total for x in moved]
        self.coefficients = [c + g * error for c, g in zip(self.coefficients, gain, strict=True)]
        size = range(len(row))
        uncertainty = [
            [(self.uncertainty[i][j] - gain[i] * moved[j]) / FORGETTING for j in size] for i in size
        ]
        if sum(uncertainty[i][i] for i in size) < MAX_UNCERTAINTY * sum(c * c for c in self.coefficients):
            self.uncertainty = uncertainty


def _nonnegative(normal: Sequence[Row], right: Sequence[float], usable: Sequence[int]) -> Row:
    """The coefficients of zero or more with the least error: the best over all subsets of ``usable``."""
    best, least = [0.0] * len(right), math.inf
    for count in range(1, len(usable) + 1):
        for subset in combinations(usable, count):
            ridge = RIDGE * sum(normal[i][i] for i in subset) / count
            small = [[normal[i][j] + ridge * (i == j) for j in subset] for i in subset]
            solution = solve(small, [right[i] for i in subset])
            if solution is None or min(solution) < 0:
                continue
            loss = -sum(x * right[i] for x, i in zip(solution, subset, strict=True))
            if loss < least:
                least, best = loss, [0.0] * len(right)
                for i, value in zip(subset, solution, strict=True):
                    best[i] = value
    return best


def _uncertainty(normal: Sequence[Row], usable: Sequence[int]) -> list[Row]:
    """The first covariance of the recursive fit; features that were always zero stay out."""
    ridge = RIDGE * sum(normal[i][i] for i in usable)
    small = inverse([[normal[i][j] + ridge * (i == j) for j in usable] for i in usable])
    full = [[0.0] * len(normal) for _ in normal]
    for i, row in zip(usable, small or [], strict=bool(small)):
        for j, value in zip(usable, row, strict=True):
            full[i][j] = value
    return full


def robust_fit(features: Sequence[Row], seconds: Sequence[float]) -> LinearFit:
    """Fit by iteratively reweighted least squares with Huber's weights."""
    size = range(len(features[0]))
    scales = [sum(row[i] for row in features) / len(features) for i in size]
    usable = [i for i in size if scales[i] > 0]
    scaled = [[row[i] / scales[i] if scales[i] else 0.0 for i in size] for row in features]
    weights, expected = [1.0] * len(seconds), list(seconds)
    coefficients, noise, normal = [0.0 for _ in size], 0.0, [[0.0 for _ in size] for _ in size]
    for _ in range(ROUNDS):
        rows = [[x / e for x in row] for row, e in zip(scaled, expected, strict=True)]
        targets = [s / e for s, e in zip(seconds, expected, strict=True)]
        weighted_rows = [[w * x for x in row] for w, row in zip(weights, rows, strict=True)]
        normal = [
            [sum(a[i] * b[j] for a, b in zip(weighted_rows, rows, strict=True)) for j in size] for i in size
        ]
        weighted = [w * t for w, t in zip(weights, targets, strict=True)]
        right = [sum(w * row[i] for w, row in zip(weighted, rows, strict=True)) for i in size]
        coefficients = _nonnegative(normal, right, usable)
        expected = [max(dot(row, coefficients), 1e-3 * s) for row, s in zip(scaled, seconds, strict=True)]
        errors = [s / e - 1.0 for s, e in zip(seconds, expected, strict=True)]
        noise = spread(errors, median(errors))
        limit = HUBER * max(noise, NOISE_FLOOR)
        weights = [min(1.0, limit / abs(error)) if error else 1.0 for error in errors]
    return LinearFit(scales, coefficients, noise, _uncertainty(normal, usable))


class WorkPredictor:
    """Predicts after ``warm_up`` iterations; ``note`` says why the declared work is not used."""

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.note = ""
        self.ignored = 0  # number of samples whose time or work is impossible
        self._warm_up = max(warm_up, 4)
        self._iterations = 0
        self._samples: list[Sample] = []  # samples kept until the first fit
        self._features = _declared
        self._fit: LinearFit | None = None

    @property
    def noise(self) -> float:
        """The relative standard deviation of the errors."""
        return self._fit.noise if self._fit is not None else 0.0

    def predict(self, work: WorkAmount) -> float | None:
        """Seconds for ``work``, or None in the warm-up and for work that is impossible."""
        if self._fit is None or not work.is_valid:
            return None
        seconds = self._fit.predict(self._features(work))
        return seconds if is_time(seconds) else None

    def learn(self, samples: Sequence[Sample]) -> None:
        """Take the micro-batches of one iteration; impossible samples are counted and dropped."""
        valid = [(work, seconds) for work, seconds in samples if is_time(seconds) and work.is_valid]
        self.ignored += len(samples) - len(valid)
        if self._fit is not None:
            for work, seconds in valid:
                self._fit.update(self._features(work), seconds)
        elif valid:
            self._samples += valid[: max(1, MOST_SAMPLES // self._warm_up)]
            self._iterations += 1
            if self._iterations >= self._warm_up:
                self._begin()

    def _begin(self) -> None:
        works, seconds = [work for work, _ in self._samples], [time for _, time in self._samples]
        self._samples = []
        self._fit = robust_fit([_declared(work) for work in works], seconds)
        plain = robust_fit([_by_samples(work) for work in works], seconds)
        costs = [work.tokens / work.micro_batches for work in works]
        centre = median(costs)
        varies = centre > 0 and spread(costs, centre) > VARIES * centre
        has_samples = all(work.samples > 0 for work in works)
        if has_samples and varies and self._fit.noise > USELESS * plain.noise:
            self.note = (
                f"the work that the loop declares does not explain its times: they spread by "
                f"{self._fit.noise:.1%} with it and by {plain.noise:.1%} without; the number of samples "
                "stands for it"
            )
            self._fit, self._features = plain, _by_samples


RECENT = 5  # number of samples whose median is the present slowness; a median ignores two outliers
SPEED_SAMPLES = 15  # number of samples whose median is a measured speed; odd, so that the median is a sample
KEPT_STEPS = 2 * SPEED_SAMPLES  # newest steps whose times are kept for each unit
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
        self.alarm = CusumAlarm(self.predictor.learn)
        self.seconds = 0.0  # of the newest step
        self.predicted_s: float | None = None
        # By step, its time over the median of the times that the models of its equals predict.
        self.relative: deque[tuple[int, float]] = deque(maxlen=KEPT_STEPS)
        self._recent: deque[float] = deque(maxlen=RECENT)  # observed over predicted time, newest samples

    @property
    def ratio(self) -> float | None:
        """The observed time over the predicted time, now; None without enough samples."""
        return median(self._recent) if len(self._recent) > RECENT // 2 else None

    @property
    def is_slow(self) -> bool:
        """Whether the alarm is raised and most of the recent samples are slow."""
        return self.alarm.is_raised and (self.ratio or 1.0) > SLOW

    @property
    def relative_time(self) -> float | None:
        """The time over the equals' times, now. The older samples of a slowed unit show its speed before."""
        return newest_median(self.relative, RECENT if self.is_slow else SPEED_SAMPLES, RECENT)

    def take(self, step: int, work: WorkAmount, seconds: float, equals: "Iterable[UnitDetector]") -> None:
        """Take a step of a unit that is compared with its ``equals``."""
        self.seconds, self.predicted_s = seconds, self.predictor.predict(work)
        expected = usual_time(equals, work)
        if expected is not None:
            self.relative.append((step, seconds / expected))
        self.observe([(work, seconds)])

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
        # While the alarm's statistic is above zero, samples wait.
        self.alarm.observe(observed, predicted, samples)
        self._recent.append(observed / predicted)


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


class ReplicaSpeed(Value):
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


# A rank explains a slow replica if its own extra time is at least this share of the replica's extra time.
EXPLAINS = 0.25


class RankHistory(Struct):
    """The times of one rank in the newest steps, and its models."""

    number: int  # rank within the replica
    detector: UnitDetector = field(default_factory=UnitDetector)
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class _Replica(Struct):
    """The detector's memory of one process of a replica."""

    replica: str
    incarnation: int
    unit: UnitDetector = field(default_factory=UnitDetector)
    step: int = -1
    skip: int = FIRST_STEPS
    ratios: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    settling: Settling | None = None  # of the relative time; None while the replica is not slow
    ranks: dict[Unit, RankHistory] = field(default_factory=dict)  # empty where the ranks are not watched
    usual_wait_s: float | None = None  # mean wait of a rank in a step, while the replica is well

    @property
    def wait_s(self) -> float:
        """The mean over the ranks of the median of their newest waits."""
        waits = [median(rank.waited_s) for rank in self.ranks.values() if rank.waited_s]
        return sum(waits) / len(waits) if waits else 0.0


class JobDetector:
    """Watches the replicas of one job, and at most ``most_ranks`` of their ranks, each as one unit."""

    def __init__(self, floor_s: float = 0.0, most_ranks: int = 0) -> None:
        self._floor_s = floor_s  # a replica that makes a step longer by less than this is not reported
        self._most_ranks = most_ranks
        self._replicas: dict[str, _Replica] = {}
        self._sizes: dict[str, int] = {}  # ranks of the replicas whose ranks are watched
        self._by_stage: dict[int, dict[Unit, RankHistory]] = {}

    def keep(self, roster: Sequence[Member]) -> None:
        """Forget processes outside ``roster``, and all ranks where the roster has too many of them."""
        sizes = {member.replica: len(member.addresses) for member in roster}
        self._sizes = sizes if sum(sizes.values()) <= self._most_ranks else {}
        members = {member.replica: member.incarnation for member in roster}
        for name, watched in [*self._replicas.items()]:
            if name not in self._sizes:
                self._forget_ranks(watched)
            if members.get(name) != watched.incarnation:
                self._forget_ranks(self._replicas.pop(name))

    def _forget_ranks(self, watched: _Replica) -> None:
        for unit in watched.ranks:
            del self._by_stage[unit.stage][unit]
        watched.ranks.clear()

    def observe(
        self,
        replica: str,
        incarnation: int,
        step: int,
        work: WorkAmount,
        seconds: float,
        ranks: Sequence[RankTimes] = (),
        *,
        is_well: bool = True,
    ) -> None:
        """Take the report of one step; a repeated or an impossible report does not count.

        ``work`` is that of rank 0. ``ranks``: the times of all ranks, which do not count in another number
        than expected. ``is_well``: whether the replica is not slow at present. Steps may go back, when the
        job begins from an older state.
        """
        watched = self._replicas.get(replica)
        if watched is None or watched.incarnation != incarnation:
            if watched is not None:
                self._forget_ranks(watched)
            watched = self._replicas[replica] = _Replica(replica, incarnation)
        if step < watched.step:
            watched.ratios.clear()
            for unit in (watched.unit, *(rank.detector for rank in watched.ranks.values())):
                unit.relative.clear()
        if step == watched.step or not work.is_valid or not is_time(seconds):
            return
        watched.step = step
        if watched.skip > 0:
            watched.skip -= 1
            return
        unit, was_slow = watched.unit, watched.unit.is_slow
        unit.take(step, work, seconds, (x.unit for x in self._replicas.values()))
        if unit.predicted_s is not None:
            watched.ratios.append((step, seconds / unit.predicted_s))
        if unit.is_slow != was_slow:  # older samples show the speed before the change
            unit.relative = deque(list(unit.relative)[-RECENT:], KEPT_STEPS)
        watched.settling = (watched.settling or Settling()) if unit.is_slow else None
        if watched.settling is not None and (relative := unit.relative_time) is not None:
            watched.settling.observe(relative)
        if ranks and len(ranks) == self._sizes.get(replica):
            self._observe_ranks(watched, work, ranks)
            if is_well and watched.ranks:
                usual = watched.usual_wait_s
                watched.usual_wait_s = (
                    watched.wait_s if usual is None else 0.95 * usual + 0.05 * watched.wait_s
                )

    def _observe_ranks(self, watched: _Replica, work: WorkAmount, ranks: Sequence[RankTimes]) -> None:
        places: dict[int, int] = {}
        for number, times in enumerate(ranks):
            place = places[times.stage] = places.get(times.stage, -1) + 1
            own = replace(work, tokens=times.tokens, squares=times.squares)
            if own.is_valid and is_time(times.compute_s):
                unit = Unit(watched.replica, times.stage, place)
                if unit not in watched.ranks:
                    watched.ranks[unit] = RankHistory(number)
                    self._by_stage.setdefault(unit.stage, {})[unit] = watched.ranks[unit]
                rank, equals = watched.ranks[unit], self._by_stage[unit.stage].values()
                rank.waited_s.append(times.waited_s)
                rank.detector.take(watched.step, own, times.compute_s, (x.detector for x in equals))

    # --- what the times show ------------------------------------------------------------------------------

    def is_alarmed(self, replica: str) -> bool:
        """Whether this replica is slow by its own past."""
        watched = self._replicas.get(replica)
        return watched is not None and watched.unit.is_slow

    def speeds(self) -> list[ReplicaSpeed]:
        """Every replica that has reported, by name."""
        return [
            ReplicaSpeed(
                replica=name,
                ratio=watched.unit.ratio,
                relative=watched.unit.relative_time,
                seconds=watched.unit.seconds,
                predicted_s=watched.unit.predicted_s,
                is_slow=watched.unit.is_slow,
                note=watched.unit.predictor.note,
                is_settled=watched.settling is None or watched.settling.is_settled,
            )
            for name, watched in sorted(self._replicas.items())
            if watched.unit.seconds
        ]

    def relative_times(self) -> dict[str, list[tuple[int, float]]]:
        """By replica, the newest times over the times that all replicas' models predict, with their steps."""
        return {name: list(watched.unit.relative) for name, watched in sorted(self._replicas.items())}

    def ranks(self) -> list[tuple[Unit, RankHistory]]:
        """The ranks with at least one sample."""
        return [
            rank for _, watched in sorted(self._replicas.items()) for rank in sorted(watched.ranks.items())
        ]

    def numbers(self, slowdown: Slowdown) -> list[int]:
        """The slow ranks of the replica; empty where the replica as a whole is slow."""
        return sorted(rank.number for rank in self._accused(slowdown))

    def speeds_of(self, slowdown: Slowdown) -> dict[int, float]:
        """Each slow rank's speed relative to its own past; empty where no rank computes slowly."""
        ranks = self._accused(slowdown) if slowdown.scope is not Scope.LINK else []
        return {x.number: 1.0 / ratio for x in ranks if (ratio := x.detector.ratio) is not None}

    def _accused(self, slowdown: Slowdown) -> list[RankHistory]:
        watched = self._replicas.get(slowdown.replica)
        if watched is None or slowdown.scope not in (Scope.RANK, Scope.STAGE, Scope.LINK):
            return []
        return [watched.ranks[unit] for unit in slowdown.units if unit in watched.ranks]

    def stages_of(self, replica: str) -> tuple[int, ...]:
        """The pipeline stage of each rank; empty where the ranks are not watched."""
        watched = self._replicas.get(replica)
        ranks = watched.ranks.items() if watched is not None else ()
        return tuple(stage for _, stage in sorted((rank.number, unit.stage) for unit, rank in ranks))

    # --- who is slow --------------------------------------------------------------------------------------

    def slowdowns(self, failed: Collection[str] = ()) -> list[Slowdown]:
        """The slow replicas, or the whole job; the slow rank, stage or link where the ranks' times tell it.

        ``failed`` replicas are left out of the comparison.
        """
        replicas = self.speeds()
        speeds = {x.replica: x for x in replicas if x.replica not in failed}
        located = []
        for slowdown in self._slow_replicas(speeds):
            asked = slowdown
            if slowdown.scope is Scope.JOB and len(replicas) == 1:
                asked = replace(slowdown, scope=Scope.REPLICA, units=(Unit(replicas[0].replica),))
            seconds = speeds[asked.replica].seconds if asked.replica else 0.0
            part = self._part(asked, seconds * (1.0 - 1.0 / slowdown.factor))
            located.append(slowdown if part is asked else replace(part, factor=slowdown.factor))
        return located

    def _slow_replicas(self, speeds: Mapping[str, ReplicaSpeed]) -> list[Slowdown]:
        replicas = [self._replicas[name] for name in speeds]
        # The newest step that all have reported; later steps would accuse the first reporter of a slow job.
        steps = [watched.step for watched in replicas if watched.ratios]
        until = min((step for step in steps if step > max(steps) - MOST_BEHIND), default=0)
        newest = {Unit(x.replica): newest_median(x.ratios, RECENT, RECENT // 2 + 1, until) for x in replicas}
        changed = localise({unit: ratio for unit, ratio in newest.items() if ratio is not None})
        if changed and changed[0].scope is Scope.JOB:  # most of the replicas must have an alarm
            if 2 * sum(x.is_slow for x in speeds.values()) > len(speeds):
                return changed
            changed = []
        changed = [x for x in changed if speeds[x.replica].is_slow]
        named = {slowdown.replica for slowdown in changed}
        changed += [x for x in self._since_they_came(replicas, until) if x.replica not in named]
        # The slowness makes the newest step of the replica longer by these seconds.
        return [x for x in changed if speeds[x.replica].seconds * (1 - 1 / x.factor) >= self._floor_s]

    @staticmethod
    def _since_they_came(replicas: Sequence[_Replica], until: int) -> list[Slowdown]:
        """Compare replicas: the model of one that was slow from its first step has learnt slow times."""
        samples = {
            x.replica: newest_median(x.unit.relative, SPEED_SAMPLES, SPEED_SAMPLES, until) for x in replicas
        }
        relative = {replica: value for replica, value in samples.items() if value is not None}
        slowdowns = []
        usual = median(list(relative.values())) if relative else 1.0
        for replica, own in relative.items():
            others = [value for other, value in relative.items() if other != replica]
            factor = own / median(others) if others and own > SLOW * usual else 1.0
            if factor > ALWAYS_SLOW:
                evidence = (
                    f"replica {replica} takes {factor:.2f} times as long as its equals for the same work "
                    f"({len(others)} others compared)"
                )
                slowdowns.append(Slowdown(Scope.REPLICA, (Unit(replica),), factor, evidence))
        return slowdowns

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
        equals: dict[Unit, float] = {}  # ranks of other replicas at the same stages
        for stage in {unit.stage for unit in slow}:
            for unit, rank in islice(self._by_stage[stage].items(), MOST_MODELS * len(slow)):
                if unit.replica != slowdown.replica and (ratio := rank.detector.ratio) is not None:
                    equals[unit] = ratio
        for part in localise({**equals, **slow}):
            if part.scope in (Scope.RANK, Scope.STAGE) and part.units[0] in slow:
                return part
        # Accuse the links between the ranks, where the ranks wait for each other and compute as usual.
        usual_s, wait_s = watched.usual_wait_s, watched.wait_s
        if usual_s is None or wait_s - usual_s < 0.5 * extra_s:
            return slowdown
        evidence = (
            f"the links between the ranks of replica {slowdown.replica} are slow: no rank computes slowly, "
            f"and a rank waits {wait_s:.3f} s in each step for the others, usually {usual_s:.3f} s"
        )
        return Slowdown(Scope.LINK, tuple(sorted(watched.ranks)), slowdown.factor, evidence)


def newest_median(
    values: Sequence[tuple[int, float]], samples: int, at_least: int, until: int | None = None
) -> float | None:
    """The median of the newest ``samples`` values up to step ``until``; None with fewer than ``at_least``."""
    newest = [value for step, value in values if until is None or step <= until][-samples:]
    return median(newest) if len(newest) >= at_least else None
