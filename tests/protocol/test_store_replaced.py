"""The control store is wiped or replaced while a job runs, and the job begins another life."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, session_of
from protocol.test_leader import Lighthouse
from protocol.test_member import FIRST, Trainer, contribution, holding, resume_of, running, vote

from fabric.model import Base, SnapshotRef
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import leader_events as lio
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# These store ids sort before and after "s", the store of all other records in this file.
STORES = ("a", "z")


def cold_start(store, names="a b", epoch=2, base=None):
    """Return the record with which the job begins again in ``store``."""
    base = base or Base(0, 0, "start", ("http://a",))
    return replace(record_of(names, epoch=epoch, generation=2, cold=epoch, base=base), store_id=store)


@pytest.mark.parametrize("store", STORES)
def test_a_running_member_reports_for_the_cold_start_of_another_store(store):
    trainer = running()
    record = cold_start(store)
    trainer.leader(m.Epoch(record))
    (report,) = trainer.said(m.Report)
    assert report.fence == record.fence and not report.prepared and not report.have
    assert report.state_generation == 0, "a state counts only where the new life begins from it"
    assert trainer.core.epochs.mode is Mode.REPORTED


@pytest.mark.parametrize("store", STORES)
def test_an_aborted_member_reports_for_the_cold_start_of_another_store(store):
    trainer = running()
    trainer.do(io.LinkLost("b", 1, "it died"))
    assert trainer.core.epochs.mode is Mode.ABORTED
    trainer.leader(m.Epoch(cold_start(store, "a")))
    assert trainer.said(m.Report) and not trainer.said(m.Aborted)


@pytest.mark.parametrize("store", STORES)
def test_no_round_prepared_under_the_last_store_is_committed(store):
    trainer = holding()
    record = cold_start(store)
    trainer.leader(m.Epoch(record))
    assert trainer.found(io.AbortExchange)
    trainer.peer("b", vote(FIRST, 0))
    assert not trainer.found(io.Apply), "the round of the last store is over"
    trainer.leader(resume_of(record, 0, a=(0, 1), b=(2, 3)))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.core.rounds.prepared is None
    assert trainer.core.memory.state.generation == 2, "it holds what the new life begins from"


@pytest.mark.parametrize("store", STORES)
def test_a_step_keeps_the_generation_in_which_it_was_committed(store):
    """The main thread applies the step later: then this member's state may belong to no generation."""
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0))
    (apply,) = trainer.found(io.Apply)
    trainer.leader(m.Epoch(cold_start(store)))
    assert apply.generation == 1 and trainer.core.memory.state.generation == 0


@pytest.mark.parametrize("store", STORES)
def test_a_round_goes_on_in_the_epochs_of_the_other_store(store):
    trainer = running()
    record = cold_start(store)
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(record, 0, (2, 3)))  # b knows the new epoch first
    trainer.leader(m.Epoch(record), resume_of(record, 0, a=(0, 1), b=(2, 3)))
    trainer.do(io.Linked(2), io.Computed(0, (0, 1), 2.0), io.Exchanged(2, 0, "g0"))
    assert trainer.told_peers(m.CommitVote), "what came early of the new store's epoch was kept"
    trainer.peer("b", vote(record, 0))
    assert trainer.found(io.Apply)


@pytest.mark.parametrize("store", STORES)
def test_a_member_behind_the_base_of_the_new_store_fetches_the_base(store):
    trainer = running()
    base = Base(1, 40, "s40", ("http://b",))
    trainer.leader(m.Epoch(cold_start(store, base=base)), resume_of(cold_start(store, base=base), 40))
    (fetch,) = trainer.found(io.FetchState)
    assert fetch.state == SnapshotRef(1, 40, "s40")


@pytest.mark.parametrize("store", STORES)
def test_a_member_that_the_other_store_does_not_list_waits_outside_without_its_state(store):
    trainer = running()
    trainer.leader(m.Epoch(cold_start(store, "b")))
    assert trainer.core.epochs.mode is Mode.OUTSIDE
    assert trainer.core.memory.state.generation == 0
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert trainer.said(m.RequestState) or trainer.core.catch_up.fetch.doing == "asked"


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("listed", ["a b", "b"])
def test_an_epoch_that_is_no_higher_starts_the_process_again(store, listed):
    """Epochs name links, so epochs must only grow in the life of a process."""
    trainer = running()
    trainer.leader(m.Epoch(cold_start(store, listed, epoch=1)))
    (stop,) = trainer.found(io.Stop)
    assert stop.code == 75 and "the control store was replaced" in stop.reason


@pytest.mark.parametrize("store", STORES)
def test_a_change_from_another_store_is_asked_for_whole(store):
    trainer = running()
    record = cold_start(store, "a")
    trainer.leader(m.RosterDelta(replace(record, roster=()), "of a roster", "of another", (), ()))
    assert trainer.said(m.RequestRoster) == [m.RequestRoster(record.fence)]


def test_messages_in_epochs_of_another_store_do_not_count_in_this_one():
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    foreign = replace(FIRST, store_id="z")
    trainer.peer("b", contribution(foreign, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    assert not trainer.told_peers(m.CommitVote), "b's contribution to this round has not come"


def test_sources_of_another_store_are_not_heeded():
    trainer = Trainer("d")
    trainer.leader(m.Epoch(FIRST))
    assert trainer.said(m.RequestState)
    fence = replace(FIRST, store_id="z").fence
    trainer.leader(m.StateSources(fence, SnapshotRef(1, 50, "s50"), ("http://a",)))
    assert not trainer.found(io.FetchState)


# --- the leader ------------------------------------------------------------------------------------------


def with_an_empty_store(snapshots=(), **session):
    """A lighthouse whose store is empty hears of two members of a job that has run for long."""
    lighthouse = Lighthouse(None, start_replicas=2)
    for name in "ab":
        lighthouse.status(name, snapshots=snapshots)
        fields = {"generation": 3, "step": 60, "epoch": 57, **session}
        lighthouse.open(name, **fields)
    lighthouse.wait(1.0)
    return lighthouse


def test_the_first_record_of_an_empty_store_is_above_all_that_its_processes_have_known():
    record = with_an_empty_store([SnapshotRef(3, 50, "s50")]).record
    assert (record.epoch, record.generation, record.base.step) == (58, 4, 50)
    assert record.cold == record.forced == record.epoch
    assert "10 steps lost" in record.reason


def test_generations_are_above_the_processes_own_where_memory_holds_older_ones_only():
    record = with_an_empty_store([SnapshotRef(2, 40, "s40")]).record
    assert record.generation == 4, "generation 3 has been, and ended otherwise"


def test_an_empty_store_does_not_call_it_a_first_start_where_steps_are_lost():
    record = with_an_empty_store([SnapshotRef(0, 0, "start")]).record
    assert record.reason.startswith("cold start from step 0") and "60 steps lost" in record.reason


def test_a_generation_number_is_not_used_twice_when_the_store_is_lost_twice():
    """After the first loss the states belong to no generation: only the processes know of generation 3."""
    record = with_an_empty_store([SnapshotRef(0, 0, "start")], generation=0, known_generation=3).record
    assert record.generation == 4 and record.reason == "cold start from step 0 of generation 0"


def test_a_member_without_a_state_of_its_generation_names_the_newest_it_knows():
    trainer = running()
    trainer.leader(m.Epoch(cold_start("z", "b")))
    trainer.do(io.LeaderConnected())
    (session,) = trainer.said(m.OpenSession)
    assert (session.generation, session.known_generation) == (0, 2)


def test_an_epoch_that_only_a_heartbeat_names_counts():
    lighthouse = Lighthouse(None, start_replicas=2)
    lighthouse.open("a", generation=3, step=60, epoch=57)
    lighthouse.beat("a", 60, epoch=58, generation=3)
    lighthouse.open("b", generation=3, step=60, epoch=57)
    lighthouse.wait(1.0)
    assert lighthouse.record.epoch == 59


def test_new_processes_begin_at_the_first_epoch():
    lighthouse = Lighthouse(None, start_replicas=1)
    lighthouse.do(lio.SessionOpened(session_of("a")))
    assert (lighthouse.record.epoch, lighthouse.record.generation) == (1, 1)
    assert lighthouse.record.reason == "first start"


def test_without_snapshots_the_job_begins_from_the_newest_state_that_a_trainer_has():
    lighthouse = Lighthouse(None, start_replicas=2)
    lighthouse.open("a", generation=3, step=60, digest="s60", epoch=57)
    # It commits three more steps with its last roster, and then it is outside every generation.
    lighthouse.say("a", m.Heartbeat(1, 57, 0, 63, "s63"))
    lighthouse.open("b", generation=3, step=60, digest="s60", epoch=57)
    lighthouse.wait(1.0)
    assert lighthouse.record.base == Base(3, 63, "s63", (session_of("a").ckpt,))
