"""The micro-benchmark of a suspected rank: bounded, without randomness, and in no phase of the step."""

import time
from types import SimpleNamespace

import pytest
import torch

from fabric.client.process import step_clock
from fabric.client.process.step_clock import MOST_S, StepClock, measure
from fabric.protocol.messages import member_events as io

CPU = torch.device("cpu")


class Now:
    """A clock that operations move."""

    def __init__(self, monkeypatch) -> None:
        self.at = 50.0
        monkeypatch.setattr(step_clock, "time", SimpleNamespace(monotonic=lambda: self.at))

    def operation(self, *seconds: float):
        """Return an operation whose runs take these seconds in turn, the last of them for ever."""
        left = list(seconds)

        def run() -> None:
            self.at += left.pop(0) if len(left) > 1 else left[0]

        return lambda _device: run


def with_operations(monkeypatch, product, copy) -> None:
    monkeypatch.setattr(step_clock, "_product", product)
    monkeypatch.setattr(step_clock, "_copy", copy)


def test_it_measures_a_product_and_a_copy_on_the_host():
    result = measure(7, 3, CPU)
    assert (result.number, result.rank) == (7, 3)
    assert result.product_s > 0 and result.copy_s > 0


def test_it_draws_no_random_numbers_and_records_no_gradient():
    before = torch.get_rng_state()
    measure(1, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


def test_fast_operations_end_within_the_limit(monkeypatch):
    now = Now(monkeypatch)
    with_operations(monkeypatch, now.operation(0.001), now.operation(0.002))
    result = measure(1, 0, CPU)
    assert now.at - 50.0 <= MOST_S + 0.01
    assert result.product_s == pytest.approx(0.001) and result.copy_s == pytest.approx(0.002)


@pytest.mark.parametrize(("seconds", "runs"), [(0.15, 2), (5.0, 1)])
def test_a_slow_operation_runs_once_or_twice(monkeypatch, seconds, runs):
    now = Now(monkeypatch)
    with_operations(monkeypatch, now.operation(seconds), now.operation(0.001))
    began = now.at
    result = measure(1, 0, CPU)
    assert now.at - began <= runs * seconds + MOST_S / 2 + 0.01
    assert result.product_s == pytest.approx(seconds)


def test_the_mean_shows_a_process_that_is_stopped_again_and_again(monkeypatch):
    now = Now(monkeypatch)
    with_operations(monkeypatch, now.operation(*[0.001, 0.009] * 40), now.operation(0.001))
    assert measure(1, 0, CPU).product_s == pytest.approx(0.005, rel=0.15)


def test_an_operation_that_fails_has_no_time(monkeypatch):
    def fail(_device):
        raise RuntimeError("no memory is left on the device")

    with_operations(monkeypatch, fail, lambda _device: lambda: None)
    result = measure(1, 0, CPU)
    assert result.product_s == 0.0 and result.copy_s > 0


def no_echo(_number: int, _peer: str):
    raise AssertionError("this order asks for no echo")


def test_rank_0_alone_echoes_and_no_device_is_measured(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])

    def measure_device(*_):
        raise AssertionError("this order asks for an echo")

    def echo(number: int, peer: str):
        at[0] += 9.0
        assert peer == "r1"
        return step_clock.SpeedMeasurement(number, round_trip_s=0.5)

    monkeypatch.setattr("fabric.client.process.step_clock.measure", measure_device)
    for rank, answers in ((0, [(4, 0.5)]), (1, [])):
        clock = StepClock(mark=at[0])
        clock.run_benchmark(io.Compute(0, (1,), 4, "r1"), rank, [("weight", torch.ones(1))], echo)
        at[0] += 1.0
        clock.end_compute()
        times = clock.times(0.0, {}, {"r1": 0.25})
        assert times.compute_s == 1.0 and times.sending_s == {"r1": 0.25}
        assert [(x.number, x.round_trip_s) for x in times.measured] == answers


def test_its_time_counts_for_no_phase_and_it_is_reported_once(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    clock = StepClock(mark=100.0)

    def run(number, rank, _device):
        at[0] += 9.0
        return step_clock.SpeedMeasurement(number, rank, 1.0, 1.0)

    monkeypatch.setattr("fabric.client.process.step_clock.measure", run)
    parameters = [("weight", torch.ones(1))]
    clock.run_benchmark(io.Compute(0, (1,)), 2, parameters, no_echo)
    assert clock.measured == ()
    clock.run_benchmark(io.Compute(0, (1,), 4), 2, parameters, no_echo)
    at[0] += 1.0
    clock.end_compute()
    times = clock.times(0.0, {})
    assert (times.compute_s, times.optimizer_s, times.waited_s) == (1.0, 0.0, 0.0)
    assert [(x.number, x.rank) for x in times.measured] == [(4, 2)]
    assert clock.times(0.0, {}).measured == ()
