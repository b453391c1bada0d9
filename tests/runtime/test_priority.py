"""Work in the background really has a lower priority, and nobody else's changes."""

import os
import threading

import pytest

from fabric.client.worker import Worker
from fabric.runtime.priority import BACKGROUND, lower_priority


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
