"""The connections of one job: replaced sessions, repeated statuses, servers with two connections."""

import asyncio

import pytest

from fabric.lighthouse.connections import connection as codes
from fabric.lighthouse.jobs.job import STATUS_S, JobConnections
from fabric.model import SnapshotRef
from fabric.protocol.messages import network as m


class FakeConnection:
    """A connection that records frames and the close code."""

    def __init__(self, replica: str = "", incarnation: int = -1) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.accepts_compression = False
        self.frames: list[bytes] = []
        self.code = 0

    def is_of(self, replica: str, incarnation: int) -> bool:
        return (self.replica, self.incarnation) == (replica, incarnation)

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def end(self, code: int, reason: str) -> None:
        self.code = code


@pytest.fixture
def connections() -> JobConnections:
    return JobConnections()


def status(**changes) -> m.TrainerStatus:
    values = {"replica": "r0", "incarnation": 1, "trainer": "running", "number": 1, "ckpt": "http://a"}
    return m.TrainerStatus(**{**values, **changes})


def test_a_newer_session_of_a_replica_replaces_the_older_one(connections):
    older, newer = FakeConnection("r0", 1), FakeConnection("r0", 2)
    connections.opened(older)
    connections.opened(older)
    assert older.code == 0, "the same session may be opened again"
    connections.opened(newer)
    assert (
        older.code == codes.REPLACED and not connections.is_current(older) and connections.is_current(newer)
    )


def test_a_message_reaches_the_addressed_process_while_its_session_opens(connections):
    inside, opening = FakeConnection("r0", 1), FakeConnection("r1", 1)
    connections.opened(inside)
    message = m.HeartbeatAck(1)
    connections.send("r0", 2, message)
    connections.send("r1", 1, message)
    assert not inside.frames and not opening.frames
    with connections.opening(opening):
        connections.send("r1", 1, message)
    connections.send("r1", 1, message)
    connections.send("r0", 1, message)
    assert (len(opening.frames), len(inside.frames)) == (1, 1)


def test_a_final_refusal_closes_the_connection_and_a_temporary_refusal_does_not(connections):
    member = FakeConnection("r0", 1)
    connections.opened(member)
    connections.send("r0", 1, m.Rejected("it waits", retry=True))
    assert member.code == 0
    connections.send("r0", 1, m.Rejected("no"))
    assert member.code == codes.REFUSED and len(member.frames) == 2


def test_the_core_gets_a_changed_status_at_once_and_a_repeated_one_rarely(connections):
    server, ref = FakeConnection(), SnapshotRef(1, 5, "d")
    assert connections.is_new_server(server) and not connections.is_new_server(server)
    held = status(snapshots=(ref,), ages_s=(0.1,))
    assert connections.is_news(server, held, 0.0)
    older = status(snapshots=(ref,), ages_s=(0.2,), number=2)
    assert not connections.is_news(server, older, STATUS_S / 2), "only the age has changed"
    assert connections.is_news(server, status(trainer="stopped", number=3), STATUS_S / 2)
    assert connections.is_news(server, status(trainer="stopped", number=4), STATUS_S * 2)


def test_a_server_is_silent_when_its_last_connection_has_ended(connections):
    first, second, other = FakeConnection(), FakeConnection(), FakeConnection()
    for connection, url in ((first, "http://a"), (second, "http://a"), (other, "http://b")):
        assert connections.is_new_server(connection)
        connections.is_news(connection, status(ckpt=url), 0.0)
    assert connections.server_closed(first) == []
    assert connections.server_closed(second) == [status()], "another server of the replica does not count"
    assert connections.server_closed(second) == []
    assert not connections.are_none


async def test_the_end_closes_every_connection(connections):
    member, server = FakeConnection("r0", 1), FakeConnection()
    connections.opened(member)
    connections.is_new_server(server)
    connections.notify_servers(m.EpochNotice(m.Fence("s", 1, 1), "", ""))
    connections.close(codes.NOT_THE_LEADER, "not the leader")
    assert connections.are_none and len(server.frames) == 1
    for _ in range(10):
        await asyncio.sleep(0)
    assert member.code == server.code == codes.NOT_THE_LEADER
