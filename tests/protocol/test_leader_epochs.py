"""The answers of an epoch outlive it, and a session may bring a policy."""

import random

import pytest
from msgspec.structs import replace

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
    assert core.state.record is None and core.writer.writing == write.record
    core.handle(io.RecordWritten(write.record.nonce), 1.0)
    return core


def test_the_answers_of_an_epoch_outlive_that_epoch(core):
    first = core.state.epoch
    core.handle(io.TrainerStatusSeen(m.TrainerStatus("r1", 1, "gone", 1)), 1.2)
    effects = core.handle(io.LeaderTick(), 1.3)
    (write,) = [effect for effect in effects if isinstance(effect, io.WriteRecord)]
    core.handle(io.RecordWritten(write.record.nonce), 1.3)
    assert core.state.record.epoch == 2 and not core.state.epoch.pending_evictions
    assert list(first.pending_evictions) == ["r1"]


def test_a_session_that_brings_a_policy_puts_it_in_force(core):
    policy = replace(core.state.config.policy, max_replicas=7)
    core.handle(io.SessionOpened(session("r0"), policy), 2.0)
    assert core.state.config.policy == policy and core.limits.most == 7
    core.handle(io.SessionOpened(session("r1")), 2.0)
    assert core.state.config.policy == policy, "the other sessions bring none"
