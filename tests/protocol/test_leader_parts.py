"""Parts of the leader core, each on its own."""

import random

import pytest
from msgspec.structs import replace
from protocol.makers import member_of, record_of, session_of
from protocol.test_leader import Lighthouse, started

from fabric.model import Base, OperatorOverrides, Sharing
from fabric.protocol.leader.admission import READMIT_LIMIT_S, READMIT_S, Backoff
from fabric.protocol.leader.base_choice import BaseChoice, base_ref
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import EMPTY_S, JobState, LeaderOutbox, Mark, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.roster_delta import for_members
from fabric.protocol.rules.assignment import seated


@pytest.fixture
def state():
    state = JobState("job", LeaderConfig(), 100.0)
    state.record = record_of("a b")
    for name in ("a", "b"):
        session = session_of(name, generation=1, step=5, epoch=2)
        state.liveness.opened(io.SessionOpened(session), state.now, is_named=False)
    return state


@pytest.fixture
def outbox(state):
    return LeaderOutbox(state)


def operator(action, **values):
    return io.Operator(action, "", "ann", "a test", **values)


def test_limits_are_those_of_the_policy_until_an_operator_scales(state):
    limits = RosterLimits(state)
    policy = state.config.policy
    assert (limits.least, limits.most, limits.full) == (
        policy.min_replicas,
        policy.max_replicas,
        policy.start_replicas,
    )
    limits.apply(operator("scale", min_replicas=2, max_replicas=3))
    assert (limits.least, limits.most, limits.full) == (2, 3, 3)
    limits.apply(operator("scale", min_replicas=0, max_replicas=0))
    assert limits.overrides == OperatorOverrides()


def test_the_first_pause_counts_until_it_is_resumed(state):
    limits = RosterLimits(state)
    limits.apply(operator("pause"))
    limits.apply(io.Operator("pause", "", "bob", "later"))
    assert limits.overrides.paused == "by ann: a test"
    limits.apply(operator("resume"))
    assert not limits.overrides.paused


def test_events_about_an_evicted_replica_carry_its_incident_until_it_is_back(outbox):
    outbox.loss_incidents["b"] = "e2"
    outbox.record_event("session opened", "b", "")
    outbox.forget_losses(record_of("a b", b={"joining": True}))
    outbox.record_event("serves", "b", "")
    outbox.forget_losses(record_of("a b"))
    outbox.record_event("finished", "b", "")
    assert [event.incident_id for event in outbox.effects] == ["e2", "e2", ""]


def test_a_process_without_a_session_is_sent_nothing(state, outbox):
    state.liveness.peers["b"].connected = False
    for name in ("a", "b", "c"):
        outbox.send(name, m.HeartbeatAck(1))
    assert [effect.replica for effect in outbox.effects] == ["a"]


def test_a_write_is_recognised_by_its_nonce_alone(state, outbox):
    limits, evidence = RosterLimits(state), FailureEvidence(state)
    writer = RecordWriter(state, outbox, limits, evidence, random.Random(1))
    writer.write_epoch(state.record, state.record.roster, forced=True, why="a test")
    written = writer.writing
    assert written.nonce != state.record.nonce and written.forced == written.epoch == 3
    assert writer.resolve(replace(written, nonce="other")) is None and writer.writing is None
    writer.writing = written
    assert writer.resolve(written) is written


def test_evidence_counts_no_eviction_that_an_operator_wanted(state):
    evidence = FailureEvidence(state)
    state.epoch.pending_evictions = {"a": "evicted by ann", "b": "its process is gone"}
    state.epoch.marks = {"a": {Mark.EXCUSED}}
    evidence.note_failures(state.record)
    assert [(x.replica, x.epoch) for x in evidence.failures] == [("b", 2)]


def test_a_failure_counts_only_with_an_eviction_that_the_store_took():
    lighthouse = started()
    lighthouse.commits = False
    lighthouse.status("b", "stopped")
    lighthouse.wait(0.5)
    lost = lighthouse.records[-1]
    assert [x.replica for x in lost.failures] == ["b"]
    lighthouse.do(io.WriteFailed(lost.nonce, definite=False))
    lighthouse.status("b")
    lighthouse.status("a", "gone")
    lighthouse.commits = True
    lighthouse.do(io.RecordRead(lighthouse.record))
    lighthouse.wait(0.5)
    assert lighthouse.record.names == ("b",), "b goes on, as no other member can take over"
    assert [x.replica for x in lighthouse.record.failures] == ["a"]
    assert [(x.host, x.times) for x in lighthouse.record.hosts] == [("a", 1)]
    assert all(x.epoch < record.epoch for record in lighthouse.records for x in record.failures)


def test_a_pardon_outlasts_a_write_that_the_store_lost(state):
    evidence, record = FailureEvidence(state), state.record
    state.epoch.pending_evictions = {"a": "its process is gone"}
    evidence.note_failures(record)
    failures, hosts = evidence.failures, evidence.hosts
    state.record = record = replace(record, epoch=3, failures=failures, hosts=hosts)
    evidence.note_failures(record)
    evidence.take_back(record)
    assert (evidence.failures, evidence.hosts) == (failures, hosts), "the failure in epoch 2 still counts"
    evidence.note_failures(record)
    evidence.forgive_past("a")
    evidence.take_back(record)
    assert (evidence.failures, evidence.hosts) == ((), ())


def test_a_base_that_a_member_has_loaded_is_usable_again(state):
    bases = BaseChoice(state)
    refused = m.CannotContinue(state.record.fence, "no such file", True)
    bases.note_cannot_load(refused, state.record)
    assert list(bases.unusable) == [base_ref(state.record)]
    bases.note_loaded(state.record.generation)
    assert not bases.unusable
    bases.note_cannot_load(refused, state.record)
    assert not bases.unusable, "another member could load it"


def test_steps_without_data_are_an_event_once_a_second(state, outbox):
    peer = state.liveness.peers["a"]
    for empty in (3, 3, 4):
        outbox.record_empty_step(peer, m.Heartbeat(1, 2, 1, 5, "", empty=empty))
    assert len(outbox.effects) == 1
    state.now += EMPTY_S
    outbox.record_empty_step(peer, m.Heartbeat(2, 2, 1, 5, "", empty=4))
    assert "step 4" in outbox.effects[1].why


def test_an_evicted_process_waits_longer_every_time_until_an_operator_admits_it():
    core = LeaderCore("job", LeaderConfig(), random.Random(1), 100.0)
    admission, waits = core.admission, []
    without = record_of("a", epoch=3)
    for _ in range(12):
        core.state.record = replace(without, roster=(*without.roster, member_of("b")))
        admission.back_off(without)
        waits.append(admission.readmission_backoff["b", 1].until - core.state.now)
    assert waits[:3] == pytest.approx([READMIT_S, 2 * READMIT_S, 4 * READMIT_S])
    assert waits[-1] == pytest.approx(READMIT_LIMIT_S)
    admission.readmit("b")
    assert admission.readmission_backoff.get(("b", 1), Backoff()) == Backoff()


def test_no_part_has_more_than_twenty_attributes():
    core = LeaderCore("job", LeaderConfig(), random.Random(1), 100.0)
    assert type(core).__bases__ == (object,)
    assert len(vars(core)) <= 20


def test_the_next_leader_remembers_the_data_slots_of_replicas_that_are_away():
    """The leader before chose the slots of a and b, which died. On other slots they would read other data."""
    sharing = Sharing(policy="shrink", data_slots=3)
    seats = {name: {"data_slot": slot} for slot, name in enumerate("abc")}
    before = replace(record_of("a b c", epoch=1, **seats), sharing=sharing)
    lighthouse = started("a b c", record=before, start_replicas=1)
    for name in "ab":
        lighthouse.status(name, "gone")
    lighthouse.wait(1.0)
    record = lighthouse.record
    assert record.names == ("c",) and record.seats == ("a", "b", "c")
    assert for_members(record).seats == ()
    writer = Lighthouse(record).core.writer
    assert writer.data_slots == {"a": 0, "b": 1, "c": 2}
    assert [x.data_slot for x in seated((*record.roster, member_of("b")), writer.data_slots)] == [2, 1]


# --- data that only some replicas can read ------------------------------------------------------------------


def read_by_two(on_loss="wait", **more):
    """A job of four members, each on its data slot: part p can be read on the slots p and p - 1."""
    seats = {name: {"data_slot": slot, **more.get(name, {})} for slot, name in enumerate("abcd")}
    record = record_of("a b c d", epoch=5, forced=4, **seats)
    return replace(record, sharing=Sharing(data_slots=4, readers=2, on_loss=on_loss))


def drain_of(name):
    return io.Operator("drain", name, "ann", "a test")


def test_a_lost_part_stops_the_job_in_a_later_epoch_too():
    lighthouse = started("a b c d", read_by_two("stop"))
    for name in "ab":
        lighthouse.status(name, "gone")
    lighthouse.wait(1.0)
    assert "no member can read shard 1" in lighthouse.record.failed


def test_a_drain_under_way_counts_for_the_next_drain():
    lighthouse = started("a b c d", read_by_two())
    lighthouse.commits = False
    assert not lighthouse.core.orders.objection(drain_of("d"))
    lighthouse.do(drain_of("a"))
    assert "no other member can read shard 0" in lighthouse.core.orders.objection(drain_of("d"))


def test_a_member_that_leaves_is_no_reader_under_the_next_leader():
    lighthouse = started("a b c d", read_by_two(a={"leaving": True}))
    lighthouse.core.orders.draining.clear()
    record = read_by_two(a={"leaving": True})
    lighthouse = Lighthouse(record)
    for name in "bcd":
        lighthouse.open(name, generation=1, step=5, epoch=5)
        lighthouse.status(name)
    assert "no other member can read shard 0" in lighthouse.core.orders.objection(drain_of("d"))


def test_a_smaller_maximum_keeps_a_reader_of_each_part():
    lighthouse = started("a b c d", read_by_two(c={"since": 2}, d={"since": 3}))
    lighthouse.do(io.Operator("scale", "", "ann", "a test", max_replicas=2))
    lighthouse.wait(1.0)
    assert set(lighthouse.core.orders.draining) == {"c"}, "d is the last reader of shard 3"


# --- a base that members could not load ---------------------------------------------------------------------


def second_generation():
    """The parts of a leader whose second generation begins from step 3, and the record."""
    record = record_of("a b", epoch=4, cold=4, generation=2, base=Base(1, 3, "x", ("http://a",)))
    return Lighthouse(record).core.bases, record


def test_only_a_load_of_the_present_base_clears_a_verdict():
    bases, record = second_generation()
    bases.unusable = {base_ref(record): "it is damaged"}
    bases.note_loaded(1)
    assert bases.unusable, "a member of the generation before loaded another base"
    bases.note_loaded(2)
    assert not bases.unusable


@pytest.mark.parametrize(("loaded", "is_passed_over"), [(1, True), (2, False)])
def test_a_base_is_passed_over_only_where_no_member_loaded_it(loaded, is_passed_over):
    bases, record = second_generation()
    bases.base_loaded_generation = loaded
    bases.note_cannot_load(m.CannotContinue(record.fence, "it is damaged", unusable=True), record)
    assert bool(bases.unusable) == is_passed_over


def test_a_retry_forgives_states_that_were_called_wrong():
    bases, record = second_generation()
    bases.mistrusted = {base_ref(record): "a disagrees"}
    bases.forgive()
    assert not bases.mistrusted
