"""The sentence on what a leader waits for, through a job's life."""

import random
import re

import pytest
from msgspec.structs import replace

from fabric.lighthouse.connections.validation import (
    parse_policy,
)
from fabric.lighthouse.diagnosis import status_text
from fabric.lighthouse.diagnosis.status_text import waiting_for
from fabric.model import DataPlan
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


def session(replica: str, **others) -> m.OpenSession:
    return m.OpenSession(replica, 1, 0, 0, "", 0, "h:1", "http://h:2", 6, **others)


NAMES = ("r0", "r1", "r2")


class TestWaiting:
    @pytest.fixture
    def core(self) -> LeaderCore:
        policy = parse_policy("2:3", 120.0)
        core = LeaderCore("job", LeaderConfig(policy=policy), random.Random(1), 0.0)
        core.handle(io.Elected("store", None), 0.0)
        return core

    def opened(self, core: LeaderCore, now: float, **others) -> list:
        """Open all sessions; return the effects of the last."""
        return [core.handle(io.SessionOpened(session(name, **others)), now) for name in NAMES][-1]

    def reported(self, core: LeaderCore, now: float) -> None:
        """Let every member answer the first epoch."""
        for name in NAMES:
            report = m.Report(core.state.record.fence, 1, 0, "", 0, 0, (), False, "", (), DataPlan(4))
            core.handle(io.FromMember(name, 1, report), now)

    def running(self, core: LeaderCore, now: float) -> None:
        """Let every member enter its first round."""
        for name in NAMES:
            core.handle(io.FromMember(name, 1, m.Running(core.state.record.fence, 0)), now)

    def committed(self, core: LeaderCore, effects: list, now: float) -> None:
        write = next(e for e in effects if isinstance(e, io.WriteRecord))
        assert waiting_for(core, now) == f"the store, to commit epoch {write.record.epoch}"
        core.handle(io.RecordWritten(write.record.nonce), now)

    def test_the_waiting_sentence_follows_a_job_from_its_first_session_to_an_eviction(self, core):
        assert "0 of at least 2" in waiting_for(core, 0.0)
        core.handle(io.SessionOpened(session("r0")), 1.0)
        core.handle(io.SessionOpened(session("r1")), 1.0)
        assert "2 of 3 have a session" in waiting_for(core, 2.0)
        assert "now 1.0 s" in waiting_for(core, 2.0)
        effects = core.handle(io.SessionOpened(session("r2")), 2.5)
        self.committed(core, effects, 2.5)
        record = core.state.record
        until = r"last seen 1\.5 s ago, may take until [\d:]+ UTC"
        assert re.fullmatch(rf"the report of r0, r1, r2 on epoch 1: {until}", waiting_for(core, 2.5))
        self.reported(core, 2.6)
        said = waiting_for(core, 2.6)
        assert said == "r0, r1, r2 to enter the first round of epoch 1: last seen 0.0 s ago"
        self.running(core, 2.7)
        assert waiting_for(core, 2.7) == "nothing: every member runs"
        core.handle(io.FromMember("r1", 1, m.Aborted(record.fence, 0, "link", "r2")), 2.8)
        said = waiting_for(core, 2.8)
        assert re.search(r"explains why r1 aborted, before forming again at [\d:]+ UTC", said)
        core.handle(io.TrainerStatusSeen(m.TrainerStatus("r2", 1, "gone", 1)), 2.81)
        effects = core.handle(io.LeaderTick(), 2.9)
        self.committed(core, effects, 2.9)
        sentence = waiting_for(core, 2.9)
        assert sentence.startswith("the report of r0, r1 on epoch 2: last seen 0.2 s ago, may")

    def test_a_member_that_stays_away_is_named_with_its_deadline(self, core, monkeypatch):
        monkeypatch.setattr(
            status_text.time, "time", lambda: 12 * 3600.0
        )  # noon on the first day of the epoch
        self.committed(core, self.opened(core, 1.0, user_code_s=180.0), 1.0)
        self.reported(core, 1.0)
        self.running(core, 1.0)
        core.handle(io.FromMember("r0", 1, m.Heartbeat(1, 1, 1, 0, waiting_for=("r2",))), 2.0)
        assert waiting_for(core, 2.5) == "nothing: every member runs", "in every step somebody is last"
        core.handle(io.FromMember("r2", 1, m.Heartbeat(1, 1, 1, 0)), 8.6)
        said = "r2, in user code in step 0, for 7.0 s now: last seen 0.4 s ago, may take until 12:02:53 UTC"
        assert waiting_for(core, 9.0) == said
        core.state.record = replace(core.state.record, roster=core.state.record.roster[:2])
        assert waiting_for(core, 9.0) == "nothing: every member runs", "nobody waits for who is outside"

    def test_the_sentence_travels_with_heartbeat_acks(self, core):
        waits, answer = status_text.WaitSentence(), m.HeartbeatAck(4)
        assert waits.attach(answer, core, 0.0) == m.HeartbeatAck(4, waiting_for(core, 0.0))
        self.committed(core, self.opened(core, 1.0), 1.0)
        self.reported(core, 2.0)
        assert "enter the first round" in waits.attach(answer, core, 2.0).waiting_for
        assert waits.attach(m.Resume(core.state.record.fence, 1, ()), core, 2.0).reason == ""
        self.running(core, 2.1)
        assert waits.attach(answer, core, 2.5).waiting_for, "looked at once a second"
        assert waits.attach(answer, core, 3.1) is answer

    def test_a_finished_member_waits_for_the_others(self, core):
        self.committed(core, self.opened(core, 1.0), 1.0)
        self.reported(core, 1.0)
        self.running(core, 1.0)
        core.handle(io.FromMember("r1", 1, m.Finished(core.state.record.fence, 9)), 2.0)
        assert waiting_for(core, 3.0) == "r0, r2 to finish as r1 did: last seen 2.0 s ago"

    def test_the_waiting_sentence_names_a_lost_write(self, core):
        effects = self.opened(core, 1.0)
        nonce = next(e for e in effects if isinstance(e, io.WriteRecord)).record.nonce
        core.handle(io.WriteFailed(nonce, definite=False), 1.0)
        assert "read the record again" in waiting_for(core, 1.0)

    def test_a_complete_job_waits_for_nothing(self, core):
        self.committed(core, self.opened(core, 1.0), 1.0)
        core.state.record = replace(
            core.state.record, complete=True, base=replace(core.state.record.base, step=9)
        )
        assert waiting_for(core, 1.0) == "nothing: the job is complete at step 9"
