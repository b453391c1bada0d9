"""Replicas of 8,192 ranks: no event may cost work for every rank, and no message may be too long."""

import random

import pytest
from msgspec.structs import replace
from protocol.makers import session_of

from fabric.errors import ProtocolError
from fabric.lighthouse.connections.validation import MOST_BYTES, decode_session
from fabric.model import Base, Member, Policy, RankAddress, Record, SnapshotRef
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.leader.liveness import Liveness, LivenessConfig, ServerStatuses
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import leader_events as le
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.nodes import NodeSays, ReplicaNodes
from fabric.protocol.ranks import Ranks, ToOthers
from fabric.store.base import MAX_VALUE_BYTES

RANKS = 8192


def addresses(replica: int, ranks: int) -> tuple[RankAddress, ...]:
    drawn = random.Random(replica)
    hosts = [f"10.{replica}.{rank >> 11}.{rank >> 3 & 255}" for rank in range(ranks)]
    return tuple(
        RankAddress(f"{host}:{drawn.randrange(32768, 60999)}", f"http://{host}:40000#{rank}")
        for rank, host in enumerate(hosts)
    )


def session(replica: int, ranks: int) -> m.OpenSession:
    first, *others = addresses(replica, ranks)
    ckpt = first.ckpt.partition("#")[0]
    return m.OpenSession(f"r{replica}", 1, 0, 0, "d" * 32, 0, first.link, ckpt, 96, ranks=tuple(others))


def status(
    replica: int, rank: int, trainer: str = "running", incarnation: int = 1, ckpt: str = ""
) -> m.TrainerStatus:
    return m.TrainerStatus(f"r{replica}", incarnation, trainer, 1, ckpt or f"http://h:1#{rank}", rank=rank)


def leader_of(replicas: int, ranks: int) -> LeaderCore:
    policy = Policy(start_replicas=replicas)
    leader = LeaderCore("job", LeaderConfig(policy=policy), random.Random(1), 0.0)

    def feed(event: le.Event, now: float) -> None:
        for effect in leader.handle(event, now):
            if isinstance(effect, le.WriteRecord):
                feed(le.RecordWritten(effect.record.nonce), now)

    feed(le.Elected("store", None), 0.0)
    for number in range(replicas):
        feed(le.SessionOpened(session(number, ranks)), 0.0)
    feed(le.LeaderTick(), 1.0)
    assert leader.state.record is not None and len(leader.state.record.roster) == replicas
    return leader


def test_a_session_and_a_record_hold_the_ranks_of_98304_gpus():
    text = wire.encode(session(0, RANKS)).decode()
    assert len(decode_session(text).ranks) == RANKS - 1
    assert len(text) < MOST_BYTES // 2  # longer host names have room too
    roster = [Member(f"r{i}", 1, "h:1", "http://h:1", ranks=addresses(i, RANKS)[1:]) for i in range(12)]
    record = Record("store", 1, 1, 1, 1, "nonce", tuple(roster), Base(1, 0))
    assert len(wire.encode_record(record)) < MAX_VALUE_BYTES


def test_a_longer_session_is_refused():
    with pytest.raises(ProtocolError, match="over the limit"):
        decode_session(wire.encode(session(0, 4 * RANKS)).decode())


def test_a_status_costs_the_leader_no_look_at_every_rank(monkeypatch):
    leader, looks = leader_of(2, 512), 0
    of_process = ServerStatuses.of_process

    def counted(self, *arguments):
        nonlocal looks
        looks += 1
        return of_process(self, *arguments)

    monkeypatch.setattr(ServerStatuses, "of_process", counted)
    for rank in range(512):
        leader.handle(le.TrainerStatusSeen(status(0, rank)), 1.0 + rank / 1000)
        leader.next_deadline()
    leader.handle(le.LeaderTick(), 2.0)
    assert looks < 512


@pytest.mark.parametrize("seed", range(40))
def test_a_leader_that_is_told_that_nothing_changed_decides_as_one_that_is_told_all(seed):
    """Two servers of a replica say their statuses to one leader, and to another what has changed."""
    drawn, ranks = random.Random(seed), 3
    told, spared = leader_of(2, ranks), leader_of(2, ranks)
    said: dict[str, m.TrainerStatus] = {}
    said_at: dict[str, float] = {}
    unchanged, now = 0, 1.0
    for _ in range(150):
        now += drawn.choice((0.05, 0.2, 0.5, 1.2))
        rank, incarnation = drawn.randrange(ranks), drawn.choice((1, 1, 1, 2))
        ckpt = f"http://host{drawn.choice((1, 1, 2))}:1#{rank}"
        trainer = drawn.choice(("running",) * 6 + ("stopped", "gone"))
        held = drawn.choice(((), (SnapshotRef(1, 5, "d"),)))
        status = m.TrainerStatus(
            "r0", incarnation, trainer, 1, ckpt, held, rank=rank, ages_s=(0.5,) * len(held)
        )
        if drawn.random() < 0.6 and ckpt in said:
            status, ago_s = said[ckpt], now - said_at[ckpt]
            unchanged += 1
            aged = replace(status, ages_s=tuple(age_s + ago_s for age_s in status.ages_s))
            events: tuple[le.Event, le.Event] = (
                le.TrainerStatusSeen(aged),
                le.StatusesUnchanged((status,), (ago_s,)),
            )
        elif drawn.random() < 0.1 and ckpt in said:
            if drawn.random() < 0.5:  # else another connection of this server goes on
                del said[ckpt]
            events = (le.TrainerStatusClosed("r0", ckpt, rank),) * 2
        else:
            said[ckpt], said_at[ckpt] = status, now
            events = (le.TrainerStatusSeen(status),) * 2
        effects = [leader.handle(event, now) for leader, event in zip((told, spared), events, strict=True)]
        assert effects[0] == effects[1]
        assert told.next_deadline() == spared.next_deadline()
        for server in (told.state.liveness.servers, spared.state.liveness.servers):
            for table in (*server.counting.values(), *server.elsewhere.values()):
                for last in table.values():
                    last.taken = tuple(round(x, 6) for x in last.taken)
        assert told.state.liveness.servers == spared.state.liveness.servers
    assert unchanged > 40


def test_the_end_of_all_ranks_of_a_replica_is_one_event():
    leader, events = leader_of(2, 64), []
    for rank in range(64):
        leader.handle(le.TrainerStatusSeen(status(0, rank)), 1.0)
    for rank in random.Random(1).sample(range(64), 64):
        effects = leader.handle(le.TrainerStatusSeen(status(0, rank, "gone")), 1.1)
        events += [x for x in effects if isinstance(x, le.RecordEvent) and x.kind == "trainer gone"]
    assert [x.about for x in events] == ["r0"]
    for rank in range(64):
        leader.handle(le.TrainerStatusSeen(status(0, rank, incarnation=2)), 1.2)
    again = leader.handle(le.TrainerStatusSeen(status(0, 3, "gone", incarnation=2)), 1.3)
    assert [x.kind for x in again if isinstance(x, le.RecordEvent)] == ["trainer gone"]


def test_a_leader_plans_for_many_ranks_as_for_many_members():
    assert leader_of(2, 512).state.is_large
    assert not leader_of(2, 8).state.is_large


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_in_trouble_are_those_that_a_look_at_all_ranks_finds(seed):
    """Servers of two processes on two hosts say anything in any order."""
    drawn, ranks = random.Random(seed), 6
    live = Liveness(LivenessConfig(), 0.0)
    members = [Member("r0", x, "h:1", "http://h:1", ranks=addresses(0, ranks)[1:]) for x in (1, 2)]
    for turn in range(120):
        now, rank, incarnation = turn / 10, drawn.randrange(ranks), drawn.choice((1, 2))
        trainer = drawn.choice(("running", "running", "stopped", "gone", "absent"))
        ckpt = f"http://host{drawn.choice((1, 2))}:1#{rank}"
        live.hear(status(0, rank, trainer, incarnation, ckpt), drawn.choice((*members, None)), now)
        if drawn.random() < 0.1:
            live.servers.closed("r0", ckpt, rank, members[0], now)
        if drawn.random() < 0.1:
            live.keep([drawn.choice(members)])
        for member in members:
            found = live.rank_trouble(member, now)
            live.servers.troubled["r0"], kept = set(range(1, ranks)), live.servers.troubled.get("r0", set())
            assert found == live.rank_trouble(member, now)
            live.servers.troubled["r0"] = kept


def test_ranks_that_are_told_the_same_get_one_command():
    first, *others = addresses(0, 16)
    identity = replace(session_of("r0", ranks=tuple(others)), link=first.link, ckpt="http://h:1")
    member = MemberCore(identity, MemberConfig(), 0.0)
    ranks = Ranks(member, tuple(range(16)))
    ranks._command(io.Compute(0, (1, 2)))
    (told,) = [x for x in ranks._effects if isinstance(x, ToOthers)]
    assert told.own == ()


def test_hosts_that_say_the_same_again_or_are_too_few_cost_no_look_at_all_hosts(monkeypatch):
    nodes, looks = ReplicaNodes(lambda: "run"), 0
    seats = ReplicaNodes._seats

    def counted(self, *arguments):
        nonlocal looks
        looks += 1
        return seats(self, *arguments)

    monkeypatch.setattr(ReplicaNodes, "_seats", counted)
    said = [NodeSays(f"id{i}", f"h{i}", i, 64, "64 nodes of 8 ranks", "h:1") for i in range(64)]
    for says in said[:-1]:
        nodes.hear(says, 0.0)
        nodes.answered(says.id, 0.0)
        nodes.hear(says, 0.1)
    assert not looks
    nodes.hear(said[-1], 0.2)
    assert looks == 1 and nodes.attempt[0] == 1
