"""The leader core, one move at a time: what it writes, announces, waits for and decides."""

import random

import pytest
from msgspec.structs import replace
from protocol.makers import member_of, record_of, report_of, session_of

from fabric.model import Base, Policy, RankAddress, Sharing, SnapshotRef
from fabric.protocol.leader import plan, state
from fabric.protocol.leader.core import ROUTINE_S, TOGETHER_S, LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

M = 4
MANY = 40  # in these tests a job is large from so many members on


@pytest.fixture(autouse=True)
def a_few_are_many(monkeypatch):
    monkeypatch.setattr(state, "MANY", MANY)


class Lighthouse:
    """Drives one leader core; by default its store commits every write at once."""

    def __init__(self, record=None, commits=True, **policy):
        self.now = 1000.0
        self.commits = commits
        config = LeaderConfig(policy=Policy(**policy), autonomy_s=30.0, autonomy_margin_s=5.0)
        self.core = LeaderCore("job", config, random.Random(1), self.now)
        self.effects, self.records = [], []
        self.incarnations = {}
        self.statuses = {}
        self.do(io.Elected("s", record))

    def spend_credit(self):
        """Let enough time pass after the election that absence counts again."""
        self.wait(10.0)

    def do(self, *events):
        """Feed these events; return their effects and the effects of the commits that they cause."""
        self.effects = []
        queue = list(events)
        while queue:
            for effect in self.core.handle(queue.pop(0), self.now):
                self.effects.append(effect)
                if isinstance(effect, io.WriteRecord):
                    self.records.append(effect.record)
                    if self.commits:
                        queue.insert(0, io.RecordWritten(effect.record.nonce))
        return self.effects

    def wait(self, seconds):
        """Let time pass as the driver does: a tick at every deadline."""
        until = self.now + seconds
        effects, ticks = [], 0
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now, ticks = max(due, self.now), ticks + 1
            assert ticks <= 60 * seconds + 20, "the leader asks for ticks without an end"
            effects += self.do(*self.statuses.values(), io.LeaderTick())
        self.now = until
        self.effects = effects
        return effects

    def open(self, *names, incarnation=1, **session):
        for name in names:
            self.incarnations[name] = incarnation
            self.do(io.SessionOpened(session_of(name, incarnation, **session)))

    def say(self, name, *messages):
        return self.do(*(io.FromMember(name, self.incarnations[name], x) for x in messages))

    def beat(self, name, step, epoch=None, generation=1):
        epoch = self.record.epoch if epoch is None else epoch
        return self.say(name, m.Heartbeat(1, epoch, generation, step))

    def status(self, name, trainer="running", incarnation=1, snapshots=(), ckpt=None):
        seen = io.TrainerStatusSeen(
            m.TrainerStatus(name, incarnation, trainer, 1, ckpt or f"http://{name}", tuple(snapshots))
        )
        self.statuses[name] = seen
        return self.do(seen)

    def lose(self, name):
        """End the replica's session and the connection of its checkpoint server."""
        self.statuses.pop(name, None)
        self.do(
            io.SessionClosed(name, self.incarnations[name]), io.TrainerStatusClosed(name, f"http://{name}")
        )

    @property
    def record(self):
        return self.core.state.record

    def sent(self, kind):
        return [
            (e.replica, e.message)
            for e in self.effects
            if isinstance(e, io.SendMember) and isinstance(e.message, kind)
        ]

    def told(self, kind):
        return [e for e in self.effects if isinstance(e, io.RecordEvent) and e.kind == kind]


def started(names="a b", record=None, **policy):
    """Return a job that runs in its first epoch, with all members at step 5."""
    record = record or record_of(names, epoch=1)
    lighthouse = Lighthouse(record, **policy)
    for name in names.split():
        lighthouse.open(name, generation=1, step=5, epoch=record.epoch)
        lighthouse.status(name)
        lighthouse.beat(name, 5)
    lighthouse.spend_credit()
    return runs(lighthouse, names, 5)


def runs(lighthouse, names, step):
    """Let these members report if needed, and run in the epoch in force."""
    record = lighthouse.record
    if record.is_forced:
        for name in names.split():
            report = report_of(record, step, have=())
            lighthouse.say(name, report)
    for name in names.split():
        lighthouse.say(name, m.Running(record.fence, step))
    return lighthouse


# --- writing ---------------------------------------------------------------------------------------------


def test_nothing_is_announced_before_the_store_has_it():
    lighthouse = Lighthouse(commits=False)
    lighthouse.open("a")
    (record,) = lighthouse.records
    assert not lighthouse.sent(m.Epoch)
    lighthouse.do(io.RecordWritten(record.nonce))
    assert lighthouse.sent(m.Epoch) == [("a", m.Epoch(record))]


def test_an_indefinite_write_is_read_again_and_recognised_by_its_nonce():
    lighthouse = Lighthouse(commits=False)
    lighthouse.open("a")
    (record,) = lighthouse.records
    lighthouse.do(io.WriteFailed(record.nonce, definite=False))
    assert lighthouse.effects == [io.ReadRecord()]
    lighthouse.do(io.RecordRead(record))
    assert lighthouse.record == record and lighthouse.sent(m.Epoch)


def test_an_indefinite_write_that_did_not_land_is_tried_again():
    lighthouse = Lighthouse(commits=False)
    lighthouse.open("a")
    lighthouse.do(io.WriteFailed(lighthouse.records[0].nonce, definite=False), io.RecordRead(None))
    assert len(lighthouse.records) == 2
    assert lighthouse.records[0].nonce != lighthouse.records[1].nonce


def in_doubt() -> Lighthouse:
    """A leader whose epoch without c was written without an answer, and is not in the store."""
    lighthouse = started("a b c")
    lighthouse.commits = False
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    lost = lighthouse.records[-1]
    lighthouse.do(io.WriteFailed(lost.nonce, definite=False), io.RecordRead(lighthouse.record))
    return lighthouse


def test_a_write_that_may_still_land_is_shut_out_before_anything_else_is_decided():
    lighthouse = in_doubt()
    *_, lost, fence = lighthouse.records
    assert fence.fence == lighthouse.record.fence and fence.nonce != lighthouse.record.nonce
    lighthouse.wait(5.0)
    assert lighthouse.records[-1] == fence, "it decides nothing before the store has answered"
    lighthouse.commits = True
    lighthouse.do(io.RecordWritten(fence.nonce))
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b") and lighthouse.record.nonce != lost.nonce


def test_a_write_that_lands_before_it_is_shut_out_counts():
    lighthouse = in_doubt()
    *_, lost, fence = lighthouse.records
    lighthouse.do(io.WriteFailed(fence.nonce, definite=True), io.RecordRead(lost))
    assert lighthouse.record == lost and lighthouse.core.state.leading


def test_a_leader_that_reads_another_leaders_record_steps_down():
    lighthouse = Lighthouse(commits=False)
    lighthouse.open("a")
    lighthouse.do(io.WriteFailed(lighthouse.records[0].nonce, definite=True))
    lighthouse.do(io.RecordRead(record_of("z", epoch=9)))
    assert [type(e) for e in lighthouse.effects] == [io.StepDown]
    assert not lighthouse.core.state.leading and lighthouse.core.next_deadline() is None


# --- starting --------------------------------------------------------------------------------------------


def test_the_first_start_waits_for_every_promised_replica():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("b")
    assert not lighthouse.records
    lighthouse.open("a")
    (record,) = lighthouse.records
    assert (record.names, record.generation, record.cold, record.forced) == (("a", "b"), 1, 1, 1)


def test_the_first_start_waits_for_the_server_of_a_script_that_begins_at_a_later_step():
    """One script begins at step 40, the other at step 30, and only the state of step 30 is served yet."""
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", step=40)
    lighthouse.open("b", step=30)
    lighthouse.status("b", snapshots=[SnapshotRef(0, 30, "thirty")])
    assert not lighthouse.records
    lighthouse.status("a", snapshots=[SnapshotRef(0, 40, "forty")])
    (record,) = lighthouse.records
    assert (record.base.step, record.base.sources) == (40, ("http://a",))


@pytest.mark.parametrize("ranks", [(), (RankAddress("a:2", "http://a#1"),)], ids=["one rank", "two ranks"])
def test_the_first_start_waits_for_a_server_where_initial_states_differ(ranks):
    """Seed 90068 of stall worlds: the other replica asked before the copy was there, and was evicted."""
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", digest="one", ranks=ranks)
    lighthouse.open("b", digest="two", ranks=ranks)
    lighthouse.wait(2.9)
    assert not lighthouse.records
    lighthouse.wait(0.7)
    assert lighthouse.record.base.digest == "one"


def test_the_first_start_from_one_initial_state_waits_for_no_server():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", "b")
    assert lighthouse.record.base.step == 0


def test_the_first_start_waits_for_the_server_of_a_later_step_only_for_the_grace_period():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", step=40)
    lighthouse.open("b", step=30)
    lighthouse.status("b", snapshots=[SnapshotRef(0, 30, "thirty")])
    lighthouse.wait(2.9)
    assert not lighthouse.records
    lighthouse.wait(0.7)
    assert lighthouse.record.base.step == 30


def test_the_first_start_waits_for_promised_replicas_only_for_start_wait_s():
    lighthouse = Lighthouse(start_replicas=2, start_wait_s=120.0)
    lighthouse.open("b")
    lighthouse.status("b")
    lighthouse.wait(119)
    assert not lighthouse.records
    lighthouse.wait(2)
    assert lighthouse.record.names == ("b",)


def test_below_the_minimum_of_replicas_the_job_does_not_start():
    lighthouse = Lighthouse(start_replicas=3, min_replicas=2, start_wait_s=1.0)
    lighthouse.open("b")
    lighthouse.wait(10)
    assert not lighthouse.records


def test_a_stopped_process_is_not_started_with():
    lighthouse = Lighthouse(start_replicas=1)
    lighthouse.status("a", "stopped")
    lighthouse.wait(1.0)
    lighthouse.open("a")
    assert not lighthouse.records


def test_the_first_start_does_not_wait_for_silence_to_end_and_silence_counts_from_then_on():
    """While thousands of replicas start, some are silent for seconds at different times."""
    lighthouse = Lighthouse(start_replicas=3)
    lighthouse.open("a", "b")
    lighthouse.wait(10.0)
    lighthouse.say("b", m.Heartbeat(1, 0, 0, 0))
    lighthouse.open("c")
    assert lighthouse.record.names == ("a", "b", "c")
    silence_s = lighthouse.core.state.config.liveness.silence_s
    lighthouse.wait(silence_s - 0.2)
    lighthouse.beat("b", 0)
    lighthouse.beat("c", 0)
    assert lighthouse.record.epoch == 1
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("b", "c"), "it is not spared for ever"


def test_after_a_loss_no_silent_replica_takes_part_in_the_start():
    lighthouse = started("a b c", start_replicas=3, start_wait_s=4.0)
    for name in "abc":
        lighthouse.status(name, "gone")
        lighthouse.do(io.SessionClosed(name, 1))
    lighthouse.open("a", "b", incarnation=2, predecessors=(1,))
    for _ in range(5):
        lighthouse.beat("b", 0)
        lighthouse.wait(1.0)
    assert (lighthouse.record.generation, lighthouse.record.names) == (2, ("b",))


@pytest.mark.parametrize("commits", [True, False])
def test_a_leader_that_waits_for_a_cold_start_or_for_the_store_does_not_ask_for_a_thousand_ticks(commits):
    lighthouse = started("a b c")
    lighthouse.commits = commits
    for name in "abc" if commits else "a":
        lighthouse.lose(name)
    lighthouse.open("d", incarnation=2)
    lighthouse.status("d", incarnation=2)
    lighthouse.wait(30.0)
    assert lighthouse.record.epoch == 1 and lighthouse.core.state.epoch.pending_evictions


def test_a_cold_start_takes_the_newest_state_that_a_server_still_holds():
    lighthouse = started()
    old, new = SnapshotRef(1, 900, "old"), SnapshotRef(2, 40, "new")
    lighthouse.status("a", "gone", snapshots=[old, new])
    lighthouse.status("b", "gone", snapshots=[new])
    assert lighthouse.record.epoch == 1, "nobody is there to start with"
    lighthouse.do(io.SessionClosed("a", 1), io.SessionClosed("b", 1))
    lighthouse.open("a", incarnation=2, predecessors=(1,))
    record = lighthouse.record
    assert (record.generation, record.cold, record.epoch) == (3, 2, 2), "later than any state that there is"
    assert record.base == Base(2, 40, "new", ("http://a", "http://b"))


def test_a_trainers_word_about_snapshots_does_not_count_against_the_servers():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.status("a", snapshots=[SnapshotRef(1, 3, "real")])
    lighthouse.status("b")
    lighthouse.open("a", "b", snapshots=(SnapshotRef(1, 7, "lost with its server"),))
    assert lighthouse.record.base.digest == "real"


def test_no_cold_start_begins_while_a_member_is_merely_out_of_sight():
    lighthouse = started()
    lighthouse.status("b", "gone")
    for name in "ab":
        lighthouse.lose(name)
    lighthouse.wait(1.0)
    lighthouse.status("b", incarnation=2)
    lighthouse.open("b", incarnation=2, predecessors=(1,))
    lighthouse.wait(33)
    assert lighthouse.record.generation == 1, "a may still be committing"
    lighthouse.wait(5)
    assert (lighthouse.record.generation, lighthouse.record.names) == (2, ("b",))


def test_a_replica_that_caught_up_to_the_end_completes_a_dead_job():
    """Found in simulation: the job was started again below its own end, with a member that had finished."""
    lighthouse = started()
    lighthouse.open("c", generation=1, step=9)
    lighthouse.say("c", m.Finished(lighthouse.record.fence, 10))
    for name in "ab":
        lighthouse.status(name, "gone")
    assert lighthouse.record.complete and lighthouse.record.base.step == 10


# --- evicting --------------------------------------------------------------------------------------------


def test_deaths_noticed_together_share_an_epoch():
    lighthouse = started("a b c")
    lighthouse.status("a", "gone")
    assert lighthouse.record.epoch == 1
    lighthouse.status("b", "gone")
    lighthouse.wait(0.05)
    assert (lighthouse.record.epoch, lighthouse.record.names) == (2, ("c",))
    assert lighthouse.record.is_forced and "its process is gone" in lighthouse.record.reason


def test_an_epoch_changes_from_the_death_until_the_store_has_the_next():
    lighthouse = started("a b c")
    assert not lighthouse.core.writer.is_changing
    lighthouse.commits = False
    lighthouse.status("a", "gone")
    assert lighthouse.core.writer.is_changing and lighthouse.core.writer.writing is None
    lighthouse.wait(0.05)
    assert lighthouse.core.writer.is_changing and lighthouse.core.writer.writing is not None
    lighthouse.do(io.RecordWritten(lighthouse.core.writer.writing.nonce))
    assert not lighthouse.core.writer.is_changing


def test_a_newcomer_alone_cannot_carry_the_job_before_it_took_part():
    record = record_of("a c", epoch=3, forced=1, c={"joining": True})
    lighthouse = Lighthouse(record)
    lighthouse.open("a", "c", generation=1, step=5)
    lighthouse.say("a", m.Running(record.fence, 6))
    lighthouse.status("c")
    lighthouse.wait(5.0)
    lighthouse.lose("a")
    lighthouse.wait(1.0)
    assert lighthouse.record == record
    lighthouse.say("c", m.Running(record.fence, 6))
    lighthouse.wait(1.0)
    assert lighthouse.record == record, "it entered round 6 with its state at 5: step 5 may be unknown to it"
    lighthouse.beat("c", 6)
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("c",) and not lighthouse.record.roster[0].joining


def test_the_last_member_goes_on_when_its_silence_ends():
    """Found in simulation: the last member counted as dead for silence, could not be evicted, and was never
    pardoned.
    """
    lighthouse = started("a")
    lighthouse.status("a", "stopped")
    lighthouse.wait(1.0)
    assert "a" in lighthouse.core.state.epoch.pending_evictions
    lighthouse.status("a", "running")
    assert "a" not in lighthouse.core.state.epoch.pending_evictions and lighthouse.told("heard again")


def test_an_operator_cannot_evict_the_last_member():
    lighthouse = started("a")
    lighthouse.do(io.Operator("evict", "a", "me", "why not"))
    assert lighthouse.told("not evicted") and not lighthouse.records


def test_a_member_that_cannot_continue_while_the_others_do_is_evicted():
    lighthouse = started()
    lighthouse.say("b", m.CannotContinue(lighthouse.record.fence, "no source"))
    lighthouse.wait(0.05)
    assert lighthouse.record.names == ("a",)


def test_when_no_member_can_continue_the_job_makes_a_cold_start():
    lighthouse = started()
    for name in "ab":
        lighthouse.say(name, m.CannotContinue(lighthouse.record.fence, "no source"))
    assert (lighthouse.record.generation, lighthouse.record.names) == (2, ("a", "b"))


def test_a_leader_that_was_stopped_itself_accuses_no_member_of_silence():
    lighthouse = started()
    lighthouse.now += 60.0
    lighthouse.do(io.LeaderTick())
    lighthouse.wait(5.0)
    assert not lighthouse.records


# --- forming again ---------------------------------------------------------------------------------------


def aborted(lighthouse, name, about="", epoch=None):
    fence = lighthouse.record.fence
    if epoch is not None:
        fence = type(fence)(fence.store_id, fence.generation, epoch)
    return lighthouse.say(name, m.Aborted(fence, 5, "the link was reset", about))


def test_an_abort_without_a_death_forms_again_in_another_order():
    lighthouse = started("a b c")
    aborted(lighthouse, "a", "b")
    assert not lighthouse.records, "a death may still show itself"
    lighthouse.wait(0.2)
    assert lighthouse.record.is_forced and lighthouse.record.names == ("c", "b", "a"), "turned around"


def test_an_abort_in_the_epoch_before_a_planned_one_counts_too():
    """Found in simulation: the leader ignored the abort because a planned epoch was in force, and all members
    waited.
    """
    lighthouse = started()
    lighthouse.open("c", generation=1, step=5)
    lighthouse.beat("c", 5)
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("a", "b", "c") and not lighthouse.record.is_forced
    aborted(lighthouse, "a", "b", epoch=1)
    lighthouse.wait(0.3)
    assert lighthouse.record.is_forced


def test_an_abort_before_the_last_forced_epoch_is_settled_already():
    lighthouse = started("a b c")
    lighthouse.status("c", "gone")
    lighthouse.wait(0.05)
    aborted(lighthouse, "a", "c", epoch=1)
    lighthouse.wait(5.0)
    assert lighthouse.record.epoch == 2


def test_an_abort_of_a_process_that_no_epoch_listed_changes_nothing():
    """Found by fuzzing: a session outside the roster could make the leader form a new epoch."""
    lighthouse = started()
    lighthouse.open("x", generation=1, step=0)
    before = lighthouse.record
    blamed_link = m.Aborted(before.fence, 5, "timed out", "a", ("b",), stalled=True, unreachable=("a", "b"))
    lighthouse.say("x", blamed_link)
    lighthouse.wait(1.0)
    assert lighthouse.record is before and not lighthouse.core.state.epoch.aborted
    assert not lighthouse.told("aborted")


def test_an_abort_of_another_process_of_a_member_changes_nothing():
    lighthouse = started()
    lighthouse.status("b", "gone")
    lighthouse.wait(0.05)
    assert lighthouse.record.names == ("a",)
    runs(lighthouse, "a", 5)
    lighthouse.open("b", incarnation=2, generation=1, step=0)
    aborted(lighthouse, "b", "a")
    assert not lighthouse.core.state.epoch.aborted


def test_an_abort_of_a_drained_member_counts_in_the_epoch_that_listed_it():
    """The drained member's abort concerns members that wait in a round of the epoch before the planned
    one.
    """
    lighthouse = started("a b c")
    lighthouse.do(io.Operator("drain", "c", "me", "a test"))
    before = lighthouse.record.epoch
    runs(lighthouse, "a b c", 6)
    assert lighthouse.record.names == ("a", "b") and not lighthouse.record.is_forced
    aborted(lighthouse, "c", "a", epoch=before)
    lighthouse.wait(0.3)
    assert lighthouse.record.is_forced and lighthouse.record.names == ("a", "b")
    aborted(lighthouse, "c", "a", epoch=before)
    lighthouse.wait(0.3)
    assert lighthouse.record.forced == lighthouse.record.epoch == before + 2, "a forced epoch has ended it"


def test_a_member_that_the_others_blame_is_left_out_in_the_end():
    lighthouse = started("a b c")
    for _ in range(5):
        names = lighthouse.record.names
        if "b" not in names:
            break
        for name in ("a", "c"):
            aborted(lighthouse, name, "b")
        lighthouse.wait(10.0)
        for name in lighthouse.record.names:
            lighthouse.say(name, report_of(lighthouse.record, 5))
    assert sorted(lighthouse.record.names) == ["a", "c"]


# --- steps without data ----------------------------------------------------------------------------------


def empty(lighthouse, name, step, said, generation=1):
    lighthouse.say(name, m.Heartbeat(1, lighthouse.record.epoch, generation, step, phase="run", empty=said))
    return [x.why for x in lighthouse.told("empty step")]


def test_a_step_without_data_makes_one_event():
    lighthouse = started()
    assert empty(lighthouse, "a", 6, said=5) == [
        "step 5 was committed with total weight 0: no member had data for it"
    ]
    lighthouse.wait(1.1)
    assert empty(lighthouse, "b", 6, said=5) == []


def test_of_many_steps_without_data_in_a_second_the_newest_makes_an_event():
    """A process with the job's token could otherwise fill the event log."""
    lighthouse = started()
    told = [why for step in range(6, 206) for why in empty(lighthouse, "a", step, said=step - 1)]
    assert len(told) == 1
    lighthouse.wait(1.1)
    (why,) = empty(lighthouse, "a", 206, said=204)
    assert why.startswith("step 204 ")


def test_only_a_member_reports_a_step_without_data_and_only_a_passed_one():
    """A report of a far generation or step would otherwise suppress all later reports."""
    lighthouse = started()
    lighthouse.open("x", generation=1, step=9)
    assert empty(lighthouse, "x", 9, said=8) == []
    assert empty(lighthouse, "a", 6, said=2**60) == []
    assert empty(lighthouse, "a", 6, said=3, generation=2**60) == []
    assert len(empty(lighthouse, "b", 6, said=5)) == 1


# --- deciding --------------------------------------------------------------------------------------------


def test_a_forced_epoch_is_decided_for_all_when_all_have_reported():
    lighthouse = started("a b c")
    lighthouse.status("c", "gone")
    lighthouse.wait(0.05)
    record = lighthouse.record
    lighthouse.say("a", report_of(record, 5, (1, 5, "a b c"), have=(0, 1)))
    assert not lighthouse.sent(m.Resume)
    lighthouse.say("b", report_of(record, 5, (1, 5, "a b c"), have=(2,)))
    (first, second) = lighthouse.sent(m.Resume)
    assert (first[0], second[0]) == ("a", "b")
    assert first[1].table == () and [row.replica for row in second[1].table] == ["b"]
    assert replace(second[1], table=()) == first[1]
    lighthouse.say("a", report_of(record, 5, (1, 5, "a b c"), have=(0, 1)))
    assert lighthouse.sent(m.Resume) == [first], "repeated on request, to the one who asks"


def test_two_leaders_decide_the_same_of_the_same_reports():
    record = record_of("a b", epoch=4)
    decisions = []
    for order in ("ab", "ba"):
        lighthouse = Lighthouse(record)
        lighthouse.open("a", "b", generation=1, step=5)
        for name in order:
            lighthouse.say(name, report_of(record, 5, (3, 5, "a b c"), have=(ord(name) - ord("a"),)))
        decisions.append(dict(lighthouse.sent(m.Resume)))
    assert decisions[0] == decisions[1] and decisions[0]


def test_a_minority_of_digests_is_evicted_and_may_not_carry_the_job_alone():
    lighthouse = started("a b c")
    aborted(lighthouse, "a")
    lighthouse.wait(0.3)
    for name in "abc":
        digest = "odd" if name == "c" else "even"
        lighthouse.say(name, report_of(lighthouse.record, 5, digest=digest))
    lighthouse.wait(0.05)
    assert sorted(lighthouse.record.names) == ["a", "b"]


def test_two_members_that_disagree_must_stop():
    lighthouse = started()
    aborted(lighthouse, "a")
    lighthouse.wait(0.3)
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5, digest=name))
    assert [r.retry for _, r in lighthouse.sent(m.Rejected)] == [False, False]
    lighthouse.wait(1.0)
    assert not lighthouse.sent(m.Rejected), "said once"


# --- joining and leaving ---------------------------------------------------------------------------------


def test_a_newcomer_is_admitted_when_it_has_caught_up():
    lighthouse = started()
    lighthouse.open("c", generation=1, step=2)
    lighthouse.beat("c", 3)
    assert not lighthouse.records, "two steps behind"
    lighthouse.beat("c", 4)
    assert lighthouse.record.names == ("a", "b", "c")
    assert lighthouse.record.member("c").joining and not lighthouse.record.is_forced


def test_a_replica_that_has_not_heard_that_it_is_outside_is_not_admitted():
    """Found in simulation: the leader evicted and admitted a stopped replica in turn, hundreds of times."""
    lighthouse = started("a b c")
    lighthouse.status("c", "stopped")
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("a", "b")
    runs(lighthouse, "a b", 5)
    lighthouse.status("c", "running")
    lighthouse.wait(1.0)
    assert lighthouse.record.epoch == 2
    lighthouse.beat("c", 5)
    assert lighthouse.record.names == ("a", "b", "c")


def test_a_replica_that_is_evicted_again_and_again_waits_longer_every_time():
    lighthouse = started("a b")
    waits = []
    for _ in range(4):
        lighthouse.do(io.Operator("evict", "b", "me", "a test"))
        lighthouse.wait(0.05)
        assert lighthouse.record.names == ("a",)
        runs(lighthouse, "a", 5)
        lighthouse.beat("b", 5)
        waited = 0.0
        while lighthouse.record.names == ("a",):
            lighthouse.wait(0.05)
            for name in "ab":
                lighthouse.status(name)
                lighthouse.beat(name, 5)
            waited += 0.05
        runs(lighthouse, "a b", 5)
        waits.append(waited)
    assert waits == sorted(waits) and waits[-1] > 4 * waits[0]


def test_no_replica_joins_while_an_answer_is_outstanding():
    lighthouse = started()
    aborted(lighthouse, "a")
    lighthouse.open("c", generation=1, step=5)
    lighthouse.beat("c", 5)
    assert not lighthouse.records


def test_a_parked_job_admits_by_a_forced_epoch():
    lighthouse = started("a b", min_replicas=2)
    lighthouse.status("b", "gone")
    lighthouse.wait(0.05)
    lighthouse.say("a", report_of(lighthouse.record, 5))
    lighthouse.open("b", incarnation=2, generation=1, step=5, predecessors=(1,))
    lighthouse.beat("b", 5)
    assert lighthouse.record.names == ("a", "b") and lighthouse.record.is_forced


def test_a_drain_takes_two_epochs_and_leaves_the_replica_outside_the_roster():
    lighthouse = started("a b c")
    lighthouse.do(io.Operator("drain", "c", "me", "a test"))
    assert lighthouse.record.member("c").leaving and not lighthouse.record.is_forced
    runs(lighthouse, "a b c", 6)
    assert lighthouse.record.names == ("a", "b") and not lighthouse.record.is_forced
    for name in "ab":
        lighthouse.beat(name, 6)
    lighthouse.beat("c", 6)
    assert lighthouse.record.names == ("a", "b"), "who was drained does not come back by itself"


def test_a_drain_goes_on_under_another_leader():
    """Found in simulation: only the dead leader's memory had the order to drain."""
    record = record_of("a b", epoch=2, forced=1, b={"leaving": True})
    lighthouse = Lighthouse(record)
    lighthouse.open("a", "b", generation=1, step=5)
    for name in "ab":
        lighthouse.beat(name, 5)
    runs(lighthouse, "a b", 5)
    assert lighthouse.record.names == ("a",)


def test_a_drained_replica_outside_must_stay_away():
    lighthouse = started()
    lighthouse.open("c")
    lighthouse.do(io.Operator("drain", "c", "me", "maintenance"))
    ((name, rejected),) = lighthouse.sent(m.Rejected)
    assert name == "c" and "drained by me (maintenance)" in rejected.reason


def test_the_last_members_are_not_drained():
    lighthouse = started()
    for name in "ab":
        lighthouse.do(io.Operator("drain", name, "me", "a test"))
    lighthouse.wait(1.0)
    assert lighthouse.record.roster


def test_a_job_that_all_have_finished_is_complete_and_admits_no_replica():
    lighthouse = started()
    for name in "ab":
        lighthouse.say(name, m.Finished(lighthouse.record.fence, 9))
    assert lighthouse.record.complete
    assert [r for r, _ in lighthouse.sent(m.Complete)] == ["a", "b"]
    lighthouse.open("c")
    assert [x.step for _, x in lighthouse.sent(m.Complete)] == [9]
    assert lighthouse.record.names == ("a", "b")


# --- serving a newcomer ----------------------------------------------------------------------------------


def needing(**policy):
    lighthouse = started(**policy)
    lighthouse.open("c")
    lighthouse.say("c", m.RequestState(lighthouse.record.fence, "nothing held"))
    return lighthouse


def test_the_members_snapshot_a_later_step_and_the_newcomer_gets_the_sources():
    lighthouse = needing()
    assert [(r, x.step) for r, x in lighthouse.sent(m.TakeSnapshotFor)] == [("a", 6), ("b", 6)]
    fence = lighthouse.record.fence
    lighthouse.say("a", m.SnapshotTaken(fence, "c", 6, "d6"))
    assert not lighthouse.sent(m.StateSources)
    lighthouse.say("b", m.SnapshotTaken(fence, "c", 6, ""))
    ((name, sources),) = lighthouse.sent(m.StateSources)
    assert (name, sources.state, sources.urls) == ("c", SnapshotRef(1, 6, "d6"), ("http://a",))


def test_when_all_members_missed_the_snapshot_step_the_leader_asks_for_a_later_step():
    lighthouse = needing()
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 6, ""))
    assert not lighthouse.sent(m.TakeSnapshotFor)
    lighthouse.wait(1.0)
    assert lighthouse.sent(m.TakeSnapshotFor)


def test_a_member_whose_session_was_lost_is_asked_again():
    """Found in simulation: the request died with the session, and the newcomer waited for ever."""
    lighthouse = needing()
    lighthouse.do(io.SessionClosed("b", 1))
    lighthouse.open("b", generation=1, step=5)
    assert [r for r, _ in lighthouse.sent(m.TakeSnapshotFor)] == ["b"]


def test_the_address_of_a_server_that_was_started_again_is_the_new_one():
    lighthouse = needing()
    lighthouse.status("a", ckpt="http://a-new")
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 6, "d6"))
    assert lighthouse.sent(m.StateSources)[0][1].urls == ("http://a-new", "http://b")


def test_gradients_are_kept_until_the_newcomer_takes_part():
    lighthouse = needing()
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 6, "d6"))
    lighthouse.beat("c", 5)
    assert lighthouse.record.names == ("a", "b", "c")
    for name in "abc":
        lighthouse.say(name, m.Running(lighthouse.record.fence, 7))
    assert not lighthouse.sent(m.StopServing), "it entered round 7 with its state at 5"
    lighthouse.beat("c", 7)
    assert {r for r, _ in lighthouse.sent(m.StopServing)} == {"a", "b", "c"}


def serving_after_a_fail_over():
    """Return a new leader, to which members say that they keep gradients for c."""
    lighthouse = Lighthouse(record_of("a b", epoch=1))
    for name in "ab":
        lighthouse.open(name, generation=1, step=5, epoch=1, serves=("c",))
        lighthouse.status(name)
        lighthouse.beat(name, 5)
    return runs(lighthouse, "a b", 5)


def test_a_new_leader_ends_the_promises_to_a_newcomer_that_does_not_come_to_it():
    lighthouse = serving_after_a_fail_over()
    assert not lighthouse.sent(m.StopServing), "it may still come"
    lighthouse.wait(4.0)
    assert {r for r, _ in lighthouse.sent(m.StopServing)} == {"a", "b"}


def test_a_new_leader_keeps_the_promises_to_a_newcomer_until_it_is_gone():
    lighthouse = serving_after_a_fail_over()
    lighthouse.open("c", generation=1, step=1, epoch=1)
    lighthouse.status("c")
    lighthouse.beat("c", 1)
    lighthouse.wait(4.0)
    assert not lighthouse.sent(m.StopServing)
    lighthouse.lose("c")
    assert {r for r, _ in lighthouse.sent(m.StopServing)} == {"a", "b"}


# --- refusing --------------------------------------------------------------------------------------------


def test_two_living_processes_cannot_be_one_replica():
    lighthouse = started()
    lighthouse.open("a", incarnation=2)
    ((_, rejected),) = lighthouse.sent(m.Rejected)
    assert "replica id a is taken by a living process" in rejected.reason


def elsewhere(name, incarnation, trainer="running"):
    """Return the status of another process of this replica id, with its own server and run folder."""
    return io.TrainerStatusSeen(m.TrainerStatus(name, incarnation, trainer, 1, "http://elsewhere"))


def test_a_refused_second_process_of_an_id_does_not_silence_the_first():
    lighthouse = started()
    lighthouse.statuses["the second b"] = elsewhere("b", 2)
    lighthouse.wait(0.1)  # the trainer status comes before the session
    assert lighthouse.do(io.SessionOpened(session_of("b", 2, generation=1)))
    assert lighthouse.sent(m.Rejected)
    lighthouse.wait(5.0)  # b's trainer holds the interpreter's lock, so the leader hears only its server
    lighthouse.statuses["the second b"] = elsewhere("b", 2, "gone")
    lighthouse.wait(5.0)
    del lighthouse.statuses["the second b"]
    lighthouse.do(io.TrainerStatusClosed("b", "http://elsewhere"))
    lighthouse.wait(0.1)
    assert lighthouse.record.epoch == 1 and not lighthouse.core.state.epoch.pending_evictions
    status = lighthouse.core.state.liveness.servers.of_rank(0)["b"]
    assert (status.incarnation, status.ckpt, status.connected) == (1, "http://b", True)
    lighthouse.status("b", "stopped")
    lighthouse.wait(0.3)
    assert lighthouse.record.names == ("a",) and "been stopped" in lighthouse.record.reason, "and at once"


def test_after_a_fail_over_the_leader_takes_the_trainer_status_of_the_incarnation_in_the_roster():
    lighthouse = Lighthouse(record_of("a b"))
    lighthouse.do(elsewhere("b", 2))
    lighthouse.status("b")
    lighthouse.do(elsewhere("b", 2, "gone"))
    status = lighthouse.core.state.liveness.servers.of_rank(0)["b"]
    assert (status.incarnation, status.trainer, status.ckpt) == (1, "running", "http://b")
    assert not lighthouse.told("trainer gone")


def test_a_new_process_on_another_host_counts_once_it_is_let_in():
    lighthouse = started("a b c")
    lighthouse.status("b", "gone")
    lighthouse.do(elsewhere("b", 2))
    assert lighthouse.core.state.liveness.servers.of_rank(0)["b"].trainer == "gone", (
        "what is certain of the old one stays so"
    )
    lighthouse.wait(0.1)
    lighthouse.open("b", incarnation=2, generation=1, step=5, predecessors=(1,))
    lighthouse.do(elsewhere("b", 2))
    lighthouse.status("b", "gone")
    status = lighthouse.core.state.liveness.servers.of_rank(0)["b"]
    assert (status.incarnation, status.trainer, status.ckpt) == (2, "running", "http://elsewhere")


def test_the_server_of_a_replica_never_admitted_is_forgotten_with_its_connection():
    lighthouse = started()
    lighthouse.status("x2")
    lighthouse.do(io.SessionOpened(session_of("x2", layout="wide")))
    assert lighthouse.sent(m.Rejected)
    lighthouse.do(io.TrainerStatusClosed("x2", "http://x2"), io.TrainerStatusClosed("b", "http://b"))
    assert set(lighthouse.core.state.liveness.servers.of_rank(0)) == {"a", "b"}
    assert not lighthouse.core.state.liveness.servers.of_rank(0)["b"].connected


def test_an_older_process_must_go():
    lighthouse = Lighthouse(start_replicas=9)
    lighthouse.open("a", incarnation=5)
    lighthouse.open("a", incarnation=4)
    assert "a newer process of a" in lighthouse.sent(m.Rejected)[0][1].reason


def test_another_model_or_other_data_is_refused_by_name():
    lighthouse = started()
    lighthouse.open("c", layout="wide")
    assert "c has other parameters" in lighthouse.sent(m.Rejected)[0][1].reason
    lighthouse.open("d", micro_batches=99)
    assert "d has other data settings" in lighthouse.sent(m.Rejected)[0][1].reason
    assert "micro_batches is 99 here and" in lighthouse.sent(m.Rejected)[0][1].reason
    lighthouse.open("e", data="until 100 on_nan skip", sharing=Sharing(data_slots=5))
    reason = lighthouse.sent(m.Rejected)[0][1].reason
    assert "e has other data settings than" in reason
    assert (
        "(until is 100 here and not given there, FABRIC_ON_NAN is skip here and not given there, " in reason
    )
    assert "seats (FABRIC_REPLICAS) is 5 here and 1 there)" in reason


def test_messages_of_an_unknown_incarnation_are_ignored():
    lighthouse = started()
    lighthouse.do(io.FromMember("a", 9, m.CannotContinue(lighthouse.record.fence, "x")))
    assert not lighthouse.effects and not lighthouse.core.state.epoch.pending_evictions


def test_a_member_is_a_roster_entry_made_of_its_session():
    lighthouse = Lighthouse()
    lighthouse.open("a", shares=3, layout="x")
    assert lighthouse.record.roster == (member_of("a", shares=3, layout="x", since=1, data_slot=0),)


def test_frequent_messages_of_very_many_are_planned_together_and_a_death_still_ends_an_epoch_soon():
    names = [f"r{i:03d}" for i in range(MANY)]
    lighthouse = Lighthouse(start_replicas=MANY, max_replicas=MANY)
    lighthouse.open(*names)
    assert not lighthouse.records, "the first plan comes with the next deadline"
    lighthouse.wait(1.0)
    assert [x.epoch for x in lighthouse.records] == [1] and len(lighthouse.records[0].roster) == MANY
    gone = m.TrainerStatus(names[7], 1, "gone", 1)
    lighthouse.do(io.TrainerStatusSeen(gone))
    due = lighthouse.core.next_deadline()
    assert due is not None and due <= lighthouse.now + TOGETHER_S
    lighthouse.wait(TOGETHER_S + 2 * lighthouse.core.state.config.coalesce_s + TOGETHER_S)
    assert lighthouse.records[-1].epoch == 2 and names[7] not in lighthouse.records[-1].names


def test_a_large_job_that_waits_for_the_store_is_not_woken_all_the_time():
    lighthouse = Lighthouse(commits=False, start_replicas=MANY, max_replicas=MANY)
    lighthouse.open(*[f"r{i:03d}" for i in range(MANY)])
    lighthouse.wait(1.0)
    assert lighthouse.core.writer.writing is not None
    ticks = 0
    until = lighthouse.now + 1.0
    while (due := lighthouse.core.next_deadline()) is not None and due <= until:
        lighthouse.now = due
        lighthouse.do(io.LeaderTick())
        ticks += 1
    assert ticks <= 1.0 / TOGETHER_S + 1


# --- very many -------------------------------------------------------------------------------------------


def crowd():
    """Return a job of so many replicas that the leader plans once for many events; all have only a
    session.
    """
    names = " ".join(f"r{i:03d}" for i in range(MANY))
    lighthouse = Lighthouse(record_of(names, epoch=1))
    lighthouse.open(*names.split(), generation=1, step=5, epoch=1)
    lighthouse.now += lighthouse.core.state.config.liveness.grace_s + 1
    for name in names.split():
        lighthouse.beat(name, 5)
    lighthouse.core.state.liveness.elected = 0.0  # forget the silence before the election
    lighthouse.core.next_deadline()
    return lighthouse


def tick_at(lighthouse, now):
    lighthouse.now = now
    lighthouse.do(io.LeaderTick())
    lighthouse.core.next_deadline()


def test_silence_is_believed_later_by_a_leader_that_is_called_late():
    """Messages that members sent meanwhile may lie unread."""
    for late_s, believed in ((0.0, True), (0.6, False)):
        lighthouse = crowd()
        silent_at = lighthouse.now + lighthouse.core.state.config.liveness.silence_s
        condemned = []
        while lighthouse.core._due + late_s < silent_at + 0.6:
            tick_at(lighthouse, lighthouse.core._due + late_s)
            condemned += lighthouse.told("evicting")
        assert bool(condemned) is believed
        for _ in range(4):
            tick_at(lighthouse, lighthouse.core._due)
            condemned += lighthouse.told("evicting")
        assert condemned, "it is called in time again"


def test_routine_messages_wait_longer_than_news():
    lighthouse = crowd()
    tick_at(lighthouse, lighthouse.now + 0.01)
    lighthouse.beat("r000", 6)
    assert lighthouse.core.plan_at == lighthouse.now + ROUTINE_S
    lighthouse.say("r001", m.Finished(lighthouse.record.fence, 5))
    assert lighthouse.core.plan_at == lighthouse.now + TOGETHER_S


def test_a_death_is_looked_at_however_many_others_speak_meanwhile():
    """With 10,000 sessions a heartbeat comes every 0.1 ms; a plan that each heartbeat postponed would never
    run.
    """
    lighthouse = crowd()
    tick_at(lighthouse, lighthouse.now + 0.01)
    lighthouse.do(io.TrainerStatusSeen(m.TrainerStatus("r007", 1, "gone", 1)))
    died, turn = lighthouse.now, 0
    while lighthouse.record.epoch == 1 and lighthouse.now < died + 1.0:
        lighthouse.now += 0.0001
        turn += 1
        lighthouse.beat(f"r{turn % MANY:03d}", 6)
        if lighthouse.core.next_deadline() <= lighthouse.now:
            lighthouse.do(io.LeaderTick())
    assert lighthouse.records[-1].epoch == 2 and "r007" not in lighthouse.records[-1].names
    assert lighthouse.now - died <= 2 * TOGETHER_S + lighthouse.core.state.config.coalesce_s


def test_after_a_fail_over_no_member_is_dead_while_others_still_come_back():
    names = "a b c d e"
    lighthouse = Lighthouse(record_of(names, epoch=1))
    for name in "abcd":
        lighthouse.wait(2.5)
        lighthouse.open(name, generation=1, step=5, epoch=1)
        lighthouse.status(name)
    assert lighthouse.record.epoch == 1
    lighthouse.wait(2.5)
    lighthouse.open("a", generation=1, step=5, epoch=1)  # a second return of a
    lighthouse.wait(1.0)
    assert lighthouse.record.epoch == 2 and "e" not in lighthouse.record.names


def herd(**policy):
    """Return a new leader of very many members, none of which is back yet."""
    names = [f"r{i:03d}" for i in range(MANY + 14)]
    return names, Lighthouse(record_of(" ".join(names), epoch=1), **policy)


def test_members_that_come_back_to_a_new_leader_are_looked_at_together(monkeypatch):
    """A plan for each returning member would examine the whole large roster thousands of times."""
    names, lighthouse = herd()
    plans, make_plan = [], plan.make_plan
    monkeypatch.setattr(plan, "make_plan", lambda core: (plans.append(lighthouse.now), make_plan(core)))
    for name in names:
        lighthouse.now += 0.006
        lighthouse.open(name, generation=1, step=5, epoch=1)
        while lighthouse.core.next_deadline() <= lighthouse.now:
            lighthouse.do(io.LeaderTick())
    assert 1 <= len(plans) <= len(names) * 0.006 / TOGETHER_S + 2


def test_a_returning_member_that_may_wait_in_the_admission_queue_is_not_called_dead():
    names, lighthouse = herd()
    lighthouse.open(*names[:20], generation=1, step=5, epoch=1)
    for name in names[:5]:  # the leader admitted these too late: they gave up and wait in the queue again
        lighthouse.do(io.SessionClosed(name, 1))
    for _ in range(4):
        lighthouse.do(io.AcceptQueueFull(20.0))
        lighthouse.wait(19.0)
        assert lighthouse.record.epoch == 1 and not lighthouse.core.state.epoch.pending_evictions
    lighthouse.open(*names[:-1], generation=1, step=5, epoch=1)
    for _ in range(4):
        for name in names[:-1]:
            lighthouse.beat(name, 5)
        lighthouse.wait(1.0)
    assert lighthouse.record.epoch == 1, "its turn may just have come"
    lighthouse.wait(1.5)
    assert lighthouse.record.epoch == 2 and lighthouse.record.names == tuple(names[:-1])


def test_a_returning_member_that_repeatedly_waits_in_the_kernels_queue_is_not_called_dead():
    """The members wait in the kernel's queue, where the admission queue does not see them."""
    names, lighthouse = herd()
    for number, name in enumerate(names[:30]):
        lighthouse.open(name, generation=1, step=5, epoch=1)
        lighthouse.do(io.SessionClosed(names[0], 1))
        lighthouse.wait(2.9)
        assert lighthouse.record.epoch == 1, f"{number} are back"
        if number % 2:
            lighthouse.open(names[0], generation=1, step=5, epoch=1)
        for other in names[1 : number + 1]:
            lighthouse.beat(other, 5)


@pytest.mark.parametrize(("late_s", "spared"), [(0.3, True), (1.0, True), (0.1, False)])
def test_returning_members_are_not_called_dead_while_the_leader_is_overloaded(late_s, spared):
    """The heartbeats of returned members take all the leader's time, so no further member gets in."""
    names, lighthouse = herd()
    lighthouse.open(*names[:45], generation=1, step=5, epoch=1)
    lighthouse.core.next_deadline()
    until = lighthouse.now + 60.0
    while lighthouse.now < until and lighthouse.record.epoch == 1:
        tick_at(lighthouse, lighthouse.core._due + late_s)
        for name in names[:45]:
            lighthouse.beat(name, 5)
        lighthouse.core.next_deadline()
    assert (lighthouse.record.epoch == 1) is spared
    kept_up = lighthouse.now
    while lighthouse.record.epoch == 1:
        tick_at(lighthouse, lighthouse.core._due)
        for name in names[:45]:
            lighthouse.beat(name, 5)
        lighthouse.core.next_deadline()
    assert lighthouse.record.names == tuple(names[:45])
    config = lighthouse.core.state.config.liveness
    assert not spared or lighthouse.now - kept_up >= config.reconnect_s + config.grace_s - 1.0


def test_an_endlessly_overloaded_leader_evicts_a_dead_member_in_the_end():
    names, lighthouse = herd()
    lighthouse.open(*names[1:], generation=1, step=5, epoch=1)
    lighthouse.core.next_deadline()
    spared_s, began = lighthouse.core.state.config.liveness.overload_s, lighthouse.now
    while lighthouse.record.epoch == 1 and lighthouse.now < began + 2 * spared_s:
        tick_at(lighthouse, lighthouse.core._due + 0.5)
        for name in names[1:]:
            lighthouse.beat(name, 5)
        lighthouse.core.next_deadline()
    assert spared_s <= lighthouse.now - began <= spared_s + 10.0
    assert lighthouse.record.names == tuple(names[1:])


def test_a_late_leader_without_an_overload_evicts_a_silent_member():
    """A member that is lost then had a session, so it was not waiting for admission."""
    lighthouse = crowd()
    tick_at(lighthouse, lighthouse.now + 0.01)
    tick_at(lighthouse, lighthouse.core._due + 0.5)
    lighthouse.do(io.SessionClosed("r007", 1))
    lighthouse.core.next_deadline()
    for _ in range(8):
        tick_at(lighthouse, lighthouse.core._due)
    assert lighthouse.record.epoch == 2 and "r007" not in lighthouse.record.names


def test_answers_that_all_must_give_are_planned_for_when_all_have():
    lighthouse = crowd()
    lighthouse.do(io.TrainerStatusSeen(m.TrainerStatus("r007", 1, "gone", 1)))
    for _ in range(4):
        tick_at(lighthouse, lighthouse.core._due)
    record = lighthouse.record
    assert record.epoch == 2 and record.is_forced
    *others, last = record.names
    tick_at(lighthouse, lighthouse.core._due)
    for name in others:
        lighthouse.say(name, report_of(record, 5, have=()))
    assert lighthouse.core.plan_at >= lighthouse.now + ROUTINE_S
    lighthouse.say(last, report_of(record, 5, have=()))
    assert lighthouse.core.plan_at <= lighthouse.now + TOGETHER_S


def test_an_endless_overload_does_not_protect_a_dead_member_for_ever():
    names, lighthouse = herd()
    lighthouse.open(*names[1:], generation=1, step=5, epoch=1)
    spared_s = lighthouse.core.state.config.liveness.overload_s
    began = lighthouse.now
    while lighthouse.record.epoch == 1 and lighthouse.now < began + 2 * spared_s:
        lighthouse.do(io.AcceptQueueFull(30.0))
        lighthouse.wait(0.5)
        for name in names[1:]:
            lighthouse.beat(name, 5)
    assert spared_s <= lighthouse.now - began <= spared_s + 10.0
    assert lighthouse.record.names == tuple(names[1:])
