"""A waiting trainer logs for whom it waits: once, then rarely, and never while effects come in time."""

import logging
import queue
import re
import threading

import pytest

from fabric.client.loop import loop_orders
from fabric.client.loop.loop_orders import WaitLogger, describe_wait

TOLD = {
    "step": 7,
    "newest_epoch": 3,
    "catching_up": "",
    "round": None,
    "lighthouse": {"url": "http://lh:8600", "connected": True},
}


class Lines(logging.Handler):
    """Collects the logged lines; sets ``said`` at each new line."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.said = threading.Semaphore(0)

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.said.release()


@pytest.fixture
def lines():
    handler = Lines()
    loop_orders.log.addHandler(handler)
    yield handler
    loop_orders.log.removeHandler(handler)


def test_a_waiting_trainer_logs_its_reason_and_continues_when_the_awaited_effect_comes(lines):
    orders = queue.SimpleQueue()
    waiting = WaitLogger("r0", lambda: "r2 in step 7", first_s=0.01)
    giver = threading.Thread(target=lambda: lines.said.acquire() and orders.put("go on"))
    giver.start()
    waiting.begin()
    assert waiting.get(orders) == "go on"
    giver.join()
    [line] = lines.lines
    assert re.fullmatch(r"fabric: r0 has waited \d+ s: for r2 in step 7", line)


def test_a_long_wait_is_logged_at_growing_intervals(lines):
    waiting = WaitLogger("r0", lambda: "r2")
    told = [(5, 60), (65, 120), (185, 240), (425, 480), (905, 600), (1505, 600), (5000, 60)]
    for now, again_s in told:
        waiting._say(now)
        assert waiting._again_s == again_s, "the longer it lasts the rarer; another wait begins anew"
    assert len(lines.lines) == len(told)


def test_many_long_waits_are_counted_and_not_listed(lines):
    """One member is slow in every step: the log gets one line, not one per step."""
    orders = queue.SimpleQueue()
    waiting = WaitLogger("r0", lambda: "r2", first_s=0.0)
    for number in range(20):
        orders.put(number)
        waiting.begin()
        assert waiting.get(orders) == number
    assert lines.lines == []
    late = threading.Thread(target=lambda: lines.said.acquire() and [orders.put(n) for n in range(20)])
    late.start()
    for number in range(20):
        waiting.begin()
        assert waiting.get(orders) == number
    late.join()
    assert len(lines.lines) == 1


def test_a_wait_without_a_known_reason_is_silent_until_there_is_one(lines):
    orders, known = queue.SimpleQueue(), iter(["", "", "r2"])
    waiting = WaitLogger("r0", lambda: next(known), first_s=0.001)
    giver = threading.Thread(target=lambda: lines.said.acquire() and orders.put("go on"))
    giver.start()
    waiting.begin()
    waiting.get(orders)
    giver.join()
    assert len(lines.lines) == 1


@pytest.mark.parametrize(
    ("more", "said", "expected"),
    [
        ({}, "r2, busy with evaluation", "r2, busy with evaluation"),
        (
            {
                "round": {"missing": ["r1", "r2"], "step": 7},
                "lighthouse": {**TOLD["lighthouse"], "connected": False},
            },
            "what it said before it went",
            "r1, r2 in step 7",
        ),
        ({"catching_up": "state"}, "", "the state of step 7 and on, from the others' checkpoint servers"),
        (
            {"lighthouse": {**TOLD["lighthouse"], "connected": False}},
            "",
            "the lighthouse at http://lh:8600, which is out of reach",
        ),
        ({}, "", "the others"),
        ({"newest_epoch": 0}, "replicas to start with", "replicas to start with"),
        ({"newest_epoch": 0}, "", ""),
    ],
)
def test_the_sentences_for_each_state(more, said, expected):
    assert describe_wait({**TOLD, **more}, said) == expected
