"""Calls of ``session.steps`` one after the other, while states come from a job that is ahead.

A model knows what a replica must do at each order: the user's code between two calls has an effect on the
state, so a state is loaded in the one call whose steps begin at it or go over it.
"""

import queue
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.client.loop.local_state import LoopProgress
from fabric.client.loop.loop_orders import LoopOrders
from fabric.exit_codes import RESTART
from fabric.protocol.messages import member_events as io


class Left(Exception):
    """The process has left, with this code."""


class Replica:
    """The orders of one process, with everything else made of plain values."""

    def __init__(self):
        self.progress = LoopProgress(begin=0)
        self.engine = SimpleNamespace(orders=queue.SimpleQueue(), post=lambda event: None, echo=None)
        self.loaded = []
        shutdown = SimpleNamespace(leave=self.leave, note_end=lambda order: None, say_start=lambda step: None)
        waits = SimpleNamespace(begin=lambda: None, get=self.next_order)
        clock = SimpleNamespace(wait_s=0.0, lap=lambda: 0.0, run_benchmark=lambda *_: None)
        state = SimpleNamespace(gradients=SimpleNamespace(parameters=()))
        replay = SimpleNamespace(install=self.install)
        self.orders = LoopOrders(self.engine, state, replay, shutdown, self.progress, clock, waits, 0)

    def next_order(self, orders):
        """Return the order that came, else the next step of the job."""
        step = self.progress.state_step
        return io.Apply(1, step, None, False, False) if orders.empty() else orders.get()

    def leave(self, reason, code):
        assert "this process starts again" in reason
        raise Left(code)

    def install(self, order):
        self.loaded.append((self.progress.begin, self.progress.until, order.step))
        self.progress.state_step = order.step

    def call(self, until):
        """Make one call of ``session.steps``; return the steps that it yields."""
        self.progress.begin, self.progress.until = self.end, until
        self.end, found = until, []
        while self.progress.state_step < until:
            order = self.orders.at_boundary(lambda: io.Ready(self.progress.state_step))
            if isinstance(order, io.Install):
                return found
            found.append(order.step)
            self.progress.state_step += 1
        return found

    end = 0  # the end of the call before


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    joins=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=3),
)
def test_a_state_is_loaded_in_the_call_that_has_its_step(lengths, joins):
    """``joins``: (call, step): a state of ``step`` comes at the begin of that call."""
    replica, begin = Replica(), 0
    for number, length in enumerate(lengths):
        until, held, coming = begin + length, replica.orders.held, None
        if held is None and replica.progress.state_step < until:
            coming = next((step for at, step in joins if at == number), None)
        if coming is not None:
            replica.engine.orders.put(io.Install(coming, ""))
        before = len(replica.loaded)
        try:
            found = replica.call(until)
        except Left as left:
            assert left.args == (RESTART,) and coming is not None and coming < begin
            return
        wanted = coming if held is None else held.step
        first = replica.progress.state_step - len(found)
        if wanted is not None and wanted >= until:
            assert replica.orders.held == io.Install(wanted, "") and found == []
            assert len(replica.loaded) == before, "the state of a later call is not loaded"
        elif wanted is not None:
            assert replica.loaded[before:] == [(begin, until, wanted)]
            assert (replica.orders.held, first) == (None, wanted)
        if replica.orders.held is None:
            assert found == list(range(first, until)), "and the call has the steps that are left"
        begin = until


def test_the_held_state_is_loaded_at_the_end_of_the_loop():
    replica = Replica()
    replica.engine.orders.put(io.Install(10, "d"))
    assert replica.call(10) == []
    assert replica.orders.held == io.Install(10, "d")
    assert not replica.loaded
    assert replica.orders.load_held() and replica.loaded == [(0, 10, 10)]
    assert not replica.orders.load_held()


@pytest.mark.parametrize("step", [3, 25])
def test_a_state_that_no_later_call_can_load_ends_the_process(step):
    """A state of an earlier call, or one that comes in the middle of a step."""
    replica = Replica()
    replica.progress.begin, replica.progress.until = 10, 20
    replica.engine.orders.put(io.Install(step, "d"))
    with pytest.raises(Left):
        replica.orders.next()


def test_a_loop_without_calls_loads_every_state():
    replica = Replica()
    replica.progress.begin, replica.progress.until = -1, 5
    replica.engine.orders.put(io.Install(5, "d"))
    replica.engine.orders.put(io.Finish(5))
    assert replica.orders.next() == io.Finish(5) and replica.loaded
