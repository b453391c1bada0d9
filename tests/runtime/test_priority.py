"""Background work has a lower priority, and the priority of other threads stays."""

import os
import threading
from pathlib import Path

import pytest

from fabric.client.process.worker import Worker
from fabric.runtime import priority
from fabric.runtime.priority import BACKGROUND, LOW_PRIORITY, LowPriorityRunner, lower_priority


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_calling_thread_is_lowered():
    before, seen = own_niceness(), []

    def background():
        lower_priority(BACKGROUND)
        seen.append(own_niceness())

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert seen == [max(before, BACKGROUND)]
    assert own_niceness() == before


@pytest.mark.parametrize("background", [True, False])
def test_a_background_worker_yields_and_another_one_does_not(background):
    seen, done, crashes = [], threading.Event(), []
    worker = Worker("test", crashes.append, background=background)
    worker.submit(lambda: seen.append(own_niceness()))
    worker.submit(done.set)
    assert done.wait(30)
    worker.close(within_s=30)
    assert seen == [max(own_niceness(), BACKGROUND) if background else own_niceness()]
    assert not crashes


def test_low_priority_work_has_a_thread_of_its_own_that_ends_with_it():
    before, run = own_niceness(), LowPriorityRunner()
    niceness, thread = run(lambda: (own_niceness(), threading.current_thread()))
    assert niceness == max(before, LOW_PRIORITY)
    assert thread is not threading.current_thread() and not thread.is_alive()
    assert own_niceness() == before


def test_an_error_of_low_priority_work_is_raised_by_its_caller():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        LowPriorityRunner()(fail)


@pytest.mark.parametrize(("waited_s", "crowded"), [(1.9, False), (2.1, True)])
def test_the_caller_does_the_work_where_low_priority_work_waits_for_long(waited_s, crowded, monkeypatch):
    run = LowPriorityRunner()
    monkeypatch.setattr(priority, "_waited_s", lambda: waited_s)
    assert run(threading.current_thread) is not threading.current_thread()
    assert run.crowded is crowded
    assert (run(threading.current_thread) is threading.current_thread()) is crowded


def test_the_kernel_says_how_long_a_thread_waited_for_a_processor(monkeypatch):
    assert LowPriorityRunner()(priority._waited_s) >= 0.0
    monkeypatch.setattr(priority, "Path", lambda _: Path("/nowhere"))
    assert priority._waited_s() == 0.0
