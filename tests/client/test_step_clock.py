"""A rank's computing time includes no waits, no pauses, and no time between steps."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fabric.client.process.step_clock import CollectiveWaits, StepClock


class Now:
    """A clock that the test moves."""

    def __init__(self, monkeypatch) -> None:
        self.at = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.at)

    def pass_s(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def now(monkeypatch):
    return Now(monkeypatch)


@pytest.fixture
def clock(now):
    return StepClock(mark=now.at)


def wait(clock: StepClock, now: Now, seconds: float) -> None:
    """Wait for another rank of the replica."""
    now.pass_s(seconds)
    clock.waits.seconds += seconds


def test_a_wait_for_other_ranks_is_reported_apart_from_computing(clock, now):
    now.pass_s(2.0)
    wait(clock, now, 3.0)
    clock.end_compute()
    times = clock.times(0.0, {})
    assert (times.compute_s, times.waited_s) == (5.0, 3.0)
    assert clock.times(0.0, {}).waited_s == 0.0


def test_waits_before_the_first_micro_batch_do_not_count(clock, now):
    """An evaluation between two steps waits for other ranks too."""
    wait(clock, now, 7.0)
    clock.end_update()
    now.pass_s(1.0)
    clock.end_compute()
    assert (clock.compute_s, clock.waited_s, clock.optimizer_s) == (1.0, 0.0, 7.0)


def test_announced_other_work_counts_neither_its_time_nor_its_waits(clock, now):
    now.pass_s(1.0)
    with clock.pause():  # session.busy
        now.pass_s(20.0)
        wait(clock, now, 30.0)
    wait(clock, now, 0.5)
    clock.end_compute()
    assert (clock.compute_s, clock.waited_s) == (1.5, 0.5)


def test_announced_other_work_that_raises_does_not_count_either(clock, now):
    with pytest.raises(ValueError), clock.pause():
        now.pass_s(20.0)
        raise ValueError
    clock.end_compute()
    assert clock.compute_s == 0.0


def test_the_wait_for_the_exchange_and_for_a_snapshot_is_no_computing(clock, now):
    now.pass_s(1.0)
    clock.end_compute()
    wait(clock, now, 4.0)
    clock.wait_s += clock.lap()
    assert (clock.compute_s, clock.waited_s, clock.wait_s) == (1.0, 0.0, 4.0)


def test_more_waiting_than_time_never_makes_a_time_below_zero(clock, now):
    clock.waits.seconds += 9.0
    now.pass_s(1.0)
    clock.end_compute()
    assert (clock.compute_s, clock.waited_s) == (1.0, 1.0)


# --- torch's collectives ----------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """Waits that the clock measures until the test ends; each wait moves the clock by two seconds."""
    moment = Now(monkeypatch)
    monkeypatch.setattr(dist.Work, "wait", lambda self, *a: moment.pass_s(2.0) or True)
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: moment.pass_s(2.0) or tensor)
    measured = CollectiveWaits()
    measured.install()
    return measured


def test_waits_for_work_and_for_tensors_are_measured(waits):
    assert dist.Work.wait(object(), 1.0) is True
    tensor = torch.ones(2)
    assert functional.wait_tensor(tensor) is tensor
    assert waits.seconds == 4.0


def test_waits_of_other_threads_are_not_measured(waits):
    """The exchange thread waits for other replicas, also when it uses torch's collectives."""
    thread = threading.Thread(target=lambda: dist.Work.wait(object()))
    thread.start()
    thread.join()
    assert waits.seconds == 0.0


def test_a_wait_inside_a_wait_counts_once(waits, monkeypatch):
    inner = functional.wait_tensor
    monkeypatch.setattr(dist.Work, "wait", lambda self: inner(torch.ones(1)) is not None)
    outer = CollectiveWaits()
    outer.install()
    dist.Work.wait(object())
    assert outer.seconds == 2.0
    assert waits.seconds == 2.0


def test_a_wait_that_raises_is_measured_and_raises(waits, monkeypatch):
    def fail(_work) -> None:
        time.monotonic()
        raise RuntimeError("the other rank is gone")

    monkeypatch.setattr(dist.Work, "wait", fail)
    waits.install()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the other rank is gone"):
            dist.Work.wait(object())
    functional.wait_tensor(torch.ones(1))
    assert waits.seconds == 2.0


def test_a_real_collective_of_one_process_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)
    monkeypatch.setattr(functional, "wait_tensor", functional.wait_tensor)
    measured = CollectiveWaits()
    measured.install()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(4))
    finally:
        dist.destroy_process_group()
    assert measured.seconds > 0.0
