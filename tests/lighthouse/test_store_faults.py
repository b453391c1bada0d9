"""Each single operation on the store goes wrong in each way. The job starts, loses a member and goes on."""

import logging
import random
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
from lighthouse.store_script import KINDS, RECORD, REPLICAS, Fault, LeapingLoop, World

from fabric.lighthouse import election
from fabric.lighthouse.jobs import job, job_history, jobs
from fabric.lighthouse.jobs.job_history import TermContext


@pytest.fixture
def play(monkeypatch):
    """Play one run to its end; return its world."""
    logging.disable(logging.CRITICAL)  # the test's own faults would log thousands of lines
    # Replace the jitter of attempts by a fixed seed, so that every run is equal.
    monkeypatch.setattr(election, "random", SimpleNamespace(Random=partial(random.Random, 0)))

    async def run(fault: Fault) -> World:
        world = World(fault)
        await world.run()
        return world

    def played(fault: Fault) -> World:
        with closing(LeapingLoop()) as loop:
            monkeypatch.setattr(jobs, "TermContext", partial(TermContext, clock=loop.time))
            for module in (job, job_history):
                clock = SimpleNamespace(time=lambda: 1.7e9 + loop.time(), monotonic=loop.time)
                monkeypatch.setattr(module, "time", clock)
            return loop.run_until_complete(run(fault))

    yield played
    logging.disable(logging.NOTSET)


START = f"commit {RECORD}"
# The number of requests of one run until its lighthouses only renew their leases.
SCRIPT = 24


def test_the_run_without_a_fault_has_one_term_and_writes_each_epoch_once(play):
    world = play(Fault(0, ""))
    assert [(r.epoch, r.names) for r in world.records] == [(1, REPLICAS), (2, REPLICAS[1:])]
    assert world.terms == ["first"] and not world.violations
    assert world.fault.seen[:SCRIPT].count(START) == 2 and len(world.fault.seen) > SCRIPT


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_announced_before_it_is_committed_and_the_run_goes_on(play, kind):
    """Each operation of the elections, the start, the loss and the first renewals fails in turn. If one
    lighthouse steps down, the other leads, and the store refuses the first one's late writes.
    """
    for number in range(1, SCRIPT + 1):
        world = play(Fault(number, kind))
        what = f"operation {number}, {world.fault.seen[number - 1]}, was {kind}"
        assert not world.violations, what
        assert [r.names for r in world.records][-1] == REPLICAS[1:], what
        # A lost write is shut out by the old record, under another nonce.
        assert len({(r.epoch, r.names) for r in world.records}) == 2, f"{what}: an epoch twice"


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("kind", "writes", "terms"),
    [
        ("refused", 2, ["first"]),
        ("unreachable", 2, ["first"]),
        ("lost answer", 1, ["first"]),
        ("lost", 2, ["first"]),
        ("slow", 1, ["first"]),
        ("cut", 2, ["first", "second"]),
    ],
)
def test_an_answer_that_is_lost_is_read_again_and_a_deposed_leader_is_refused(play, kind, nth, writes, terms):
    """``nth`` chooses the write of the start or the write of the loss."""
    world = play(Fault(nth, kind, of=START))
    assert not world.violations and world.terms == terms
    shuts_out = kind == "lost" and nth == 2  # else there is no old record to write again, or no doubt
    assert [r.epoch for r in world.records] == ([1, 1, 2] if shuts_out else [1, 2])
    asked = [what for what in world.fault.seen if what.endswith(RECORD)]
    assert asked.count(START) == 1 + writes + shuts_out
    # After any failed write the leader must read the record before it writes again.
    looked = kind in ("refused", "unreachable", "lost answer", "lost")
    assert asked.count(f"get {RECORD}") == looked
    if looked:
        assert asked[nth] == f"get {RECORD}"
