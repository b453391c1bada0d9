"""Find the slow stage of a pipeline from its predicted and observed iterations, as the papers do."""

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.health.alarm import CusumAlarm
from fabric.health.detector import WARM_UP, UnitDetector
from fabric.health.localise import Slowdown, Unit, localise
from fabric.health.work import WorkAmount, is_time
from papers.pipeline_schedules import PipelineCosts, PipelineSchedule, makespan


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The parameters of one replica's pipeline."""

    stages: int
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    transfer_s: float = 0.0  # seconds of a transfer between neighbouring stages
    forward_share: float = 1 / 3  # the forward pass's share of a micro-batch's time
    backward_share: float = 1 / 3  # the share of the input's gradient; the rest goes to the weights' gradient

    def iteration_s(self, times: Sequence[Sequence[float]]) -> float:
        """The makespan, from the time of each micro-batch at each stage."""
        weight_share = 1.0 - self.forward_share - self.backward_share

        def table(share: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(share * time for time in row) for row in times)

        costs = PipelineCosts(table(self.forward_share), table(self.backward_share), table(weight_share))
        return makespan(self.schedule, costs, self.transfer_s)


class PipelineDetector:
    """Watches one replica of pipeline stages: one alarm on its iterations, and one on each stage."""

    def __init__(self, replica: str, shape: PipelineShape, warm_up: int = WARM_UP) -> None:
        self.shape = shape
        self.iteration = CusumAlarm()
        self.predicted_s: float | None = None  # predicted seconds of the newest iteration
        self._replica = replica
        self._stages = [UnitDetector(warm_up) for _ in range(shape.stages)]

    @property
    def is_raised(self) -> bool:
        """Whether the alarm of the iterations or of a stage is raised."""
        return self.iteration.is_raised or any(stage.alarm.is_raised for stage in self._stages)

    def predict_micro_batches(self, works: Sequence[WorkAmount]) -> list[list[float]] | None:
        """The seconds of each micro-batch at each stage, or None in the warm-up."""
        rows = [[stage.predictor.predict(work) for work in works] for stage in self._stages]
        times = [[time for time in row if time is not None] for row in rows]
        return times if works and all(len(row) == len(works) for row in times) else None

    def predict(self, works: Sequence[WorkAmount]) -> float | None:
        """The seconds of an iteration over these micro-batches, or None in the warm-up."""
        times = self.predict_micro_batches(works)
        return self.shape.iteration_s(times) if times is not None else None

    def observe(
        self, works: Sequence[WorkAmount], times: Sequence[Sequence[float]], iteration_s: float
    ) -> None:
        """Take one iteration: ``times`` of each micro-batch by stage, and the whole iteration's."""
        self.predicted_s = self.predict(works)
        if self.predicted_s is not None and is_time(iteration_s):
            self.iteration.observe(iteration_s, self.predicted_s)
        for stage, row in zip(self._stages, times, strict=True):
            stage.observe(list(zip(works, row, strict=True)))

    def unit_ratios(self) -> dict[Unit, float]:
        """The ratio of each stage that has one; 1 where its alarm is silent."""
        return {
            Unit(self._replica, number): (stage.ratio or 1.0) if stage.is_slow else 1.0
            for number, stage in enumerate(self._stages)
        }

    def slowdowns(self) -> list[Slowdown]:
        return localise(self.unit_ratios())
