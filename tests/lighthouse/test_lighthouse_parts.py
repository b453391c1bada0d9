"""The small parts: the log of events, what may come in, and the sentence on what is waited for."""

import asyncio
import random
import re
from dataclasses import replace

import pytest

from fabric.errors import ConfigError, ProtocolError
from fabric.lighthouse.connections.validation import (
    MOST_REPLICAS,
    check_name,
    decode_member,
    decode_pulse,
    parse_policy,
)
from fabric.lighthouse.diagnosis import status_text
from fabric.lighthouse.diagnosis.status_text import waiting_for
from fabric.lighthouse.jobs.job_events import EventLog
from fabric.lighthouse.jobs.job_store import job_of, record_key
from fabric.model import Fence, SnapshotRef
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire


class TestEventLog:
    async def test_ids_grow_even_when_the_clock_does_not(self):
        log = EventLog(clock=lambda: 5.0, steady=lambda: 1.0)
        ids = [log.add("k", 1, "", "").id for _ in range(3)]
        assert ids == [5_000_000, 5_000_001, 5_000_002]

    async def test_the_newest_are_kept(self):
        log = EventLog(capacity=3)
        added = [log.add("k", i, "", "") for i in range(5)]
        assert log.after(0) == added[2:]
        assert log.after(added[3].id) == added[4:]
        assert log.after(added[4].id) == []

    async def test_a_follower_gets_what_is_there_what_comes_and_the_end(self):
        log = EventLog()
        first = log.add("a", 1, "", "")
        follower = log.follow(0)
        assert await anext(follower) == [first]
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        assert not waiting.done()
        second = log.add("b", 1, "", "")
        assert await waiting == [second]
        third = log.add("c", 1, "", "")
        log.end_followers()
        assert await anext(follower) == [third]
        with pytest.raises(StopAsyncIteration):
            await anext(follower)

    async def test_reasons_are_bounded(self):
        assert len(EventLog().add("k", 1, "", "x" * 10_000).why) == 2000


class TestIncoming:
    def test_policies(self):
        assert parse_policy("3", 9.0).start_replicas == 3 and parse_policy("3", 9.0).min_replicas == 1
        assert (
            parse_policy("3", 9.0).max_replicas == MOST_REPLICAS
            and parse_policy("3", 9.0).start_wait_s == 9.0
        )
        ranged = parse_policy("2:8", 9.0)
        assert (ranged.min_replicas, ranged.start_replicas, ranged.max_replicas) == (2, 8, 8)
        assert parse_policy("", 9.0).start_replicas == 1
        assert parse_policy("50000", 9.0).max_replicas == 50_000
        for bad in ("0", "0:1", "3:2", "a", "1:2:3", "-1"):
            with pytest.raises(ConfigError):
                parse_policy(bad, 9.0)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 65, "a\n"])
    def test_names(self, name):
        with pytest.raises(ProtocolError):
            check_name("job", name)

    def test_only_what_members_say_is_taken(self):
        fence = Fence("s", 1, 1)
        for message in (
            m.Complete(fence, 1),
            m.CommitVote(fence, 1, 1, ""),
            m.TrainerStatus("r", 1, "gone", 1),
        ):
            with pytest.raises(ProtocolError):
                decode_member(wire.encode(message).decode())
        assert decode_member(wire.encode(m.Running(fence, 1)).decode()) == m.Running(fence, 1)

    @pytest.mark.parametrize("ages_s", [(1.0, 2.0), (-0.1,)])
    def test_ages_of_snapshots_fit_them(self, ages_s):
        pulse = m.TrainerStatus("r0", 1, "running", 1, "", (SnapshotRef(1, 5, "d"),))
        for good in ((), (0.5,)):
            assert decode_pulse(wire.encode(replace(pulse, ages_s=good)).decode()).ages_s == good
        with pytest.raises(ProtocolError, match="ages_s"):
            decode_pulse(wire.encode(replace(pulse, ages_s=ages_s)).decode())

    def test_sentences_are_cut_and_printable(self):
        aborted = decode_member(wire.encode(m.Aborted(Fence("s", 1, 1), 1, "a\nb" + "x" * 999)).decode())
        assert aborted.why.startswith("a bx") and len(aborted.why) == 300

    def test_the_job_is_found_in_the_key(self):
        assert job_of("ns", record_key("ns", "gpt-2")) == "gpt-2"
        assert job_of("ns", "/fabric/ns/jobs/gpt-2/other") == ""


def session(replica: str, **others) -> m.OpenSession:
    return m.OpenSession(replica, 1, 0, 0, "", 0, "h:1", "http://h:2", 6, **others)


NAMES = ("r0", "r1", "r2")


class TestWaiting:
    """The sentence follows a leader through a job's life."""

    @pytest.fixture
    def core(self) -> LeaderCore:
        policy = parse_policy("2:3", 120.0)
        core = LeaderCore("job", LeaderConfig(policy=policy), random.Random(1), 0.0)
        core.handle(io.Elected("store", None), 0.0)
        return core

    def opened(self, core: LeaderCore, now: float, **others) -> list:
        """Everybody has a session; the effects of the last."""
        return [core.handle(io.SessionOpened(session(name, **others)), now) for name in NAMES][-1]

    def reported(self, core: LeaderCore, now: float) -> None:
        """Everybody has answered the first epoch."""
        for name in NAMES:
            report = m.Report(core.record.fence, 1, 0, "", 0, 0, (), False, "", ())
            core.handle(io.FromMember(name, 1, report), now)

    def running(self, core: LeaderCore, now: float) -> None:
        """Everybody has entered its first round."""
        for name in NAMES:
            core.handle(io.FromMember(name, 1, m.Running(core.record.fence, 0)), now)

    def committed(self, core: LeaderCore, effects: list, now: float) -> None:
        write = next(e for e in effects if isinstance(e, io.WriteRecord))
        assert waiting_for(core.view, now) == f"the store, to commit epoch {write.record.epoch}"
        core.handle(io.RecordWritten(write.record.nonce), now)

    def test_from_the_first_session_to_an_eviction(self, core):
        assert "0 of at least 2" in waiting_for(core.view, 0.0)
        core.handle(io.SessionOpened(session("r0")), 1.0)
        core.handle(io.SessionOpened(session("r1")), 1.0)
        assert "2 of 3 have a session" in waiting_for(core.view, 2.0)
        assert "now 1.0 s" in waiting_for(core.view, 2.0)
        effects = core.handle(io.SessionOpened(session("r2")), 2.5)
        self.committed(core, effects, 2.5)
        record = core.record
        until = r"last seen 1\.5 s ago, may take until [\d:]+ UTC"
        assert re.fullmatch(rf"the report of r0, r1, r2 on epoch 1: {until}", waiting_for(core.view, 2.5))
        self.reported(core, 2.6)
        said = waiting_for(core.view, 2.6)
        assert said == "r0, r1, r2 to enter the first round of epoch 1: last seen 0.0 s ago"
        self.running(core, 2.7)
        assert waiting_for(core.view, 2.7) == "nothing: every member runs"
        core.handle(io.FromMember("r1", 1, m.Aborted(record.fence, 0, "link", "r2")), 2.8)
        said = waiting_for(core.view, 2.8)
        assert re.search(r"explains why r1 aborted, before forming again at [\d:]+ UTC", said)
        core.handle(io.TrainerStatusSeen(m.TrainerStatus("r2", 1, "gone", 1)), 2.81)
        effects = core.handle(io.LeaderTick(), 2.9)
        self.committed(core, effects, 2.9)
        sentence = waiting_for(core.view, 2.9)
        assert sentence.startswith("the report of r0, r1 on epoch 2: last seen 0.2 s ago, may")

    def test_a_member_that_stays_away_is_named_with_its_deadline(self, core, monkeypatch):
        monkeypatch.setattr(
            status_text.time, "time", lambda: 12 * 3600.0
        )  # noon on the first day of the epoch
        self.committed(core, self.opened(core, 1.0, user_code_s=180.0), 1.0)
        self.reported(core, 1.0)
        self.running(core, 1.0)
        core.handle(io.FromMember("r0", 1, m.Heartbeat(1, 1, 1, 0, waiting_for=("r2",))), 2.0)
        assert waiting_for(core.view, 2.5) == "nothing: every member runs", "in every step somebody is last"
        core.handle(io.FromMember("r2", 1, m.Heartbeat(1, 1, 1, 0)), 8.6)
        said = "r2, in user code in step 0, for 7.0 s now: last seen 0.4 s ago, may take until 12:02:53 UTC"
        assert waiting_for(core.view, 9.0) == said
        core.record = replace(core.record, roster=core.record.roster[:2])
        assert waiting_for(core.view, 9.0) == "nothing: every member runs", "nobody waits for who is outside"

    def test_members_are_told_it_with_the_answers_to_their_beats(self, core):
        waits, answer = status_text.Waits(), m.HeartbeatAck(4)
        assert waits.told_with(answer, core.view, 0.0) == m.HeartbeatAck(4, waiting_for(core.view, 0.0))
        self.committed(core, self.opened(core, 1.0), 1.0)
        self.reported(core, 2.0)
        assert "enter the first round" in waits.told_with(answer, core.view, 2.0).waiting_for
        assert waits.told_with(m.Resume(core.record.fence, 1, ()), core.view, 2.0).reason == ""
        self.running(core, 2.1)
        assert waits.told_with(answer, core.view, 2.5).waiting_for, "looked at once a second"
        assert waits.told_with(answer, core.view, 3.1) is answer

    def test_who_has_finished_waits_for_the_others(self, core):
        self.committed(core, self.opened(core, 1.0), 1.0)
        self.reported(core, 1.0)
        self.running(core, 1.0)
        core.handle(io.FromMember("r1", 1, m.Finished(core.record.fence, 9)), 2.0)
        assert waiting_for(core.view, 3.0) == "r0, r2 to finish as r1 did: last seen 2.0 s ago"

    def test_a_lost_write(self, core):
        effects = self.opened(core, 1.0)
        nonce = next(e for e in effects if isinstance(e, io.WriteRecord)).record.nonce
        core.handle(io.WriteFailed(nonce, definite=False), 1.0)
        assert "read the record again" in waiting_for(core.view, 1.0)

    def test_a_complete_job_waits_for_nothing(self, core):
        self.committed(core, self.opened(core, 1.0), 1.0)
        core.record = replace(core.record, complete=True, base=replace(core.record.base, step=9))
        assert waiting_for(core.view, 1.0) == "nothing: the job is complete at step 9"
