"""The read-only view of a leader core."""

import random
from dataclasses import replace

import pytest

from fabric.model import Policy
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

NAMES = ("r0", "r1")


def session(name: str) -> m.OpenSession:
    return m.OpenSession(name, 1, 0, 0, "", 0, "h:1", "http://h:2", 6)


@pytest.fixture
def core() -> LeaderCore:
    config = LeaderConfig(policy=Policy(min_replicas=1, start_replicas=2))
    core = LeaderCore("job", config, random.Random(1), 0.0)
    core.handle(io.Elected("store", None), 0.0)
    for name in NAMES:
        effects = core.handle(io.SessionOpened(session(name)), 1.0)
    (write,) = [effect for effect in effects if isinstance(effect, io.WriteRecord)]
    assert core.view.record is None and core.view.record_in_flight == write.record
    core.handle(io.RecordWritten(write.record.nonce), 1.0)
    return core


def test_the_view_shows_the_core_as_it_is_now(core):
    view = core.view
    assert view.record.epoch == 1 and view.record_in_flight is None and set(view.peers) == set(NAMES)
    core.handle(io.FromMember("r0", 1, m.Heartbeat(1, 1, 1, 4)), 1.1)
    assert view.peers["r0"].step == view.highest_step == view.top_step() == 4
    core.handle(io.TrainerStatusSeen(m.TrainerStatus("r1", 1, "gone", 1)), 1.2)
    assert list(view.epoch.pending_evictions) == ["r1"] and view.is_changing
    assert view.liveness.proven_dead(view.record.member("r1"))
    assert view.liveness.statuses()["r1"].trainer == "gone" and not view.liveness.statuses(1)


def test_the_view_of_an_epoch_outlives_that_epoch(core):
    first = core.view.epoch
    core.handle(io.TrainerStatusSeen(m.TrainerStatus("r1", 1, "gone", 1)), 1.2)
    effects = core.handle(io.LeaderTick(), 1.3)
    (write,) = [effect for effect in effects if isinstance(effect, io.WriteRecord)]
    core.handle(io.RecordWritten(write.record.nonce), 1.3)
    assert core.view.record.epoch == 2 and not core.view.epoch.pending_evictions
    assert list(first.pending_evictions) == ["r1"]


def test_a_session_that_brings_a_policy_puts_it_in_force(core):
    policy = replace(core.view.policy, max_replicas=7)
    core.handle(io.SessionOpened(session("r0"), policy), 2.0)
    assert core.view.policy == policy and core.view.max_members == 7
    core.handle(io.SessionOpened(session("r1")), 2.0)
    assert core.view.policy == policy, "the other sessions bring none"
