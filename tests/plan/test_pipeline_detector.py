"""The detector of the papers on synthetic streams through a pipeline."""

import pytest
from health_streams import Fault, play
from papers.pipeline_schedules import PipelineSchedule


@pytest.mark.parametrize("length", [8192, 16384, 32768])
def test_an_undisturbed_pipeline_is_predicted_and_raises_no_alarm(length):
    result = play(1, length)
    errors, iterations = result.micro_batch_errors, result.iteration_errors
    assert len(errors) > 2000 and sum(errors) / len(errors) <= 0.015
    assert len(iterations) > 100 and sum(iterations) / len(iterations) <= 0.05
    assert result.false_alarms == 0


@pytest.mark.parametrize("stage", range(4))
def test_a_slow_stage_is_named_within_three_iterations(stage):
    result = play(2, 8192, Fault(stage, 1.5))
    assert result.false_alarms == 0
    assert result.found_after is not None and result.found_after <= 3


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_every_schedule_can_be_followed(schedule):
    result = play(3, 16384, Fault(1, 1.5), schedule)
    assert result.false_alarms == 0 and result.found_after is not None and result.found_after <= 3
