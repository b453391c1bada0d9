"""Synthetic streams of packed sequences through a pipeline, with or without a slow stage."""

import math
import random
from dataclasses import dataclass, field

from papers.pipeline_detector import PipelineDetector, PipelineShape
from papers.pipeline_schedules import PipelineSchedule

from fabric.health.localise import Scope
from fabric.health.work import WorkAmount

ITERATIONS = 220
WARM_UP = 50
FAULT_AT = 120
STAGES = MICRO_BATCHES = 4
NOISE = 0.01  # relative noise of each operation's time and of each iteration's time
HIDDEN = 4096
TOKEN_S = 1e-5  # seconds of one token in one stage, without attention
FIXED_S = 2e-3  # fixed seconds of one micro-batch in one stage
MEDIAN_LENGTH, SIGMA = 900, 1.5  # log-normal distribution of a document's length


@dataclass(frozen=True, slots=True)
class Fault:
    """One stage that gets slow and stays so."""

    stage: int
    factor: float
    at: int = FAULT_AT


@dataclass(slots=True)
class StreamResult:
    """The detector's work on one stream."""

    micro_batch_errors: list[float] = field(default_factory=list)  # relative errors before the fault
    iteration_errors: list[float] = field(default_factory=list)
    false_alarms: int = 0  # alarms raised before the fault
    found_after: int | None = None  # iterations from the fault to a verdict that names the stage


def documents(rng: random.Random, length: int) -> list[float]:
    """The lengths of documents that fill one sequence; the last one is cut."""
    lengths, left = [], length
    while left > 0:
        lengths.append(min(left, max(1, round(rng.lognormvariate(math.log(MEDIAN_LENGTH), SIGMA)))))
        left -= lengths[-1]
    return [float(x) for x in lengths]


def true_seconds(work: WorkAmount) -> float:
    """The time of a micro-batch in one stage: causal attention of a model of 4,096 channels."""
    return TOKEN_S * (work.tokens + work.squares / (12 * HIDDEN)) + FIXED_S


def play(
    seed: int,
    length: int,
    fault: Fault | None = None,
    schedule: PipelineSchedule = PipelineSchedule.SPLIT_1F1B,
) -> StreamResult:
    """One job of 220 iterations, seen by the detector."""
    rng = random.Random(f"health {seed} {length}")
    shape, result = PipelineShape(STAGES, schedule), StreamResult()
    detector = PipelineDetector("r0", shape, warm_up=WARM_UP)
    was_raised = False
    for iteration in range(ITERATIONS):
        faulty = fault if fault is not None and iteration >= fault.at else None
        works = [WorkAmount.of_documents(documents(rng, length)) for _ in range(MICRO_BATCHES)]
        times = [
            [
                true_seconds(work)
                * rng.gauss(1, NOISE)
                * (faulty.factor if faulty and s == faulty.stage else 1)
                for work in works
            ]
            for s in range(STAGES)
        ]
        iteration_s = shape.iteration_s(times) * rng.gauss(1, NOISE)
        predicted = detector.predict_micro_batches(works)
        detector.observe(works, times, iteration_s)
        if faulty is None:
            if iteration >= WARM_UP and predicted is not None:
                result.micro_batch_errors += [
                    abs(p - t) / t
                    for row in zip(predicted, times, strict=True)
                    for p, t in zip(*row, strict=True)
                ]
            if detector.predicted_s is not None:
                result.iteration_errors.append(abs(detector.predicted_s - iteration_s) / iteration_s)
            result.false_alarms += detector.is_raised and not was_raised
            was_raised = detector.is_raised
        elif result.found_after is None:
            named = {(x.scope, x.units[0].stage) for x in detector.slowdowns() if x.units}
            if named == {(Scope.STAGE, faulty.stage)}:
                result.found_after = iteration - faulty.at + 1
    return result
