"""Predict the time of work: ``seconds = a * tokens + b * squares + c * micro_batches``.

The first samples are fitted robustly and all at once (Huber weights, coefficients of zero or more). Later
samples move the coefficients by recursive least squares with forgetting. Errors count relative to the
prediction, so that long and short micro-batches weigh the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from fabric.health.statistics import Row, dot, inverse, solve, spread
from fabric.health.work import WorkAmount, is_time

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
NEW_LAYOUT_NOISE = 0.2  # the relative error that a new fixed cost may have
VARIES = 0.02  # work that varies less cannot show whether it predicts the time
USELESS = 0.95  # the work is used if its errors are below this share of the errors of the number of samples


Sample = tuple[WorkAmount, float]  # the work of a sample, and the seconds that it took


def _declared(work: WorkAmount) -> Row:
    return [work.tokens, work.squares, float(work.micro_batches)]


def _by_samples(work: WorkAmount) -> Row:
    return [work.samples, 0.0, float(work.micro_batches)]


@dataclass(slots=True)
class LinearFit:
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


def _normal(rows: Sequence[Row], weights: Sequence[float]) -> list[Row]:
    size = range(len(rows[0]))
    return [
        [sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) for j in size] for i in size
    ]


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
        normal = _normal(rows, weights)
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
    def is_ready(self) -> bool:
        return self._fit is not None

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

    def rescale(self, factor: float) -> None:
        """Follow a new layout: ``factor`` is the new share of the layers over the old one, divided by the
        growth of the tensor-parallel group. The cost per micro-batch stays; later samples move it alone."""
        if self._fit is None or not (math.isfinite(factor) and factor > 0):
            return
        fit = self._fit
        fit.coefficients = [fit.coefficients[0] * factor, fit.coefficients[1] * factor, fit.coefficients[2]]
        usual = sum(fit.coefficients)  # the time of usual work, whose scaled features are all 1
        fit.noise = max(fit.noise, NEW_LAYOUT_NOISE)
        fit.uncertainty = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, usual * usual]]
