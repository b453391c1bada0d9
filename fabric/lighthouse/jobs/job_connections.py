"""The connections of one job: sessions of trainers, and connections of checkpoint servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from fabric.lighthouse.connections import connection as codes
from fabric.lighthouse.connections.connection import (
    FrameCache,
    MemberConnection,
    SendPacer,
    WorkQueue,
    text_frame,
)
from fabric.lighthouse.diagnosis.server_states import HeardStatus
from fabric.protocol.messages import network as m

# The core gets an unchanged trainer status this often, and a changed status at once.
STATUS_S = 0.2
_ENDS_PER_TURN = 20  # connections closed per turn of the event loop; each takes some 150 microseconds


class JobConnections:
    """The open connections of one job; sends messages over them."""

    def __init__(self) -> None:
        self.sessions: dict[str, MemberConnection] = {}  # replica -> the connection of its session
        # Statuses are kept by connection, because a second process with this replica and rank, which the core
        # refuses, has a checkpoint server, too.
        self.servers: dict[MemberConnection, dict[tuple[str, int], HeardStatus]] = {}
        self.pacer = SendPacer()
        self._frames = FrameCache()
        self._opening: MemberConnection | None = None

    @property
    def are_none(self) -> bool:
        return not (self.sessions or self.servers)

    # --- sessions --------------------------------------------------------------------------------------

    @contextmanager
    def opening(self, connection: MemberConnection) -> Iterator[None]:
        """While this context is open, the connection also gets the core's messages for its process."""
        self._opening = connection
        try:
            yield
        finally:
            self._opening = None

    def opened(self, connection: MemberConnection) -> None:
        """Note that the core has accepted this session, which replaces an older one of the replica."""
        older = self.sessions.get(connection.replica)
        self.sessions[connection.replica] = connection
        if older is not None and older is not connection:
            older.end(codes.REPLACED, "replaced by a newer session of the same replica")

    def is_current(self, connection: MemberConnection) -> bool:
        """Whether this is the newest session of its replica."""
        return self.sessions.get(connection.replica) is connection

    def refuse(self, connection: MemberConnection, reason: str) -> None:
        """Say why, and close the connection."""
        connection.send(self._frames.of(m.Rejected(reason), connection.accepts_compression))
        connection.end(codes.REFUSED, reason)

    def send(self, replica: str, incarnation: int, message: m.LeaderMessage) -> None:
        """Send to exactly this process, if it has a session. A final refusal closes its connection."""
        for connection in (self._opening, self.sessions.get(replica)):
            if connection is not None and connection.is_of(replica, incarnation):
                self.pacer.send(connection, self._frames.of(message, connection.accepts_compression))
                if isinstance(message, m.Rejected) and not message.retry:
                    connection.end(codes.REFUSED, message.reason)
                return

    # --- checkpoint servers ----------------------------------------------------------------------------

    def is_new_server(self, connection: MemberConnection) -> bool:
        """Whether this is the connection's first message; note that it has come."""
        if connection in self.servers:
            return False
        self.servers[connection] = {}
        return True

    def is_news(self, connection: MemberConnection, status: m.TrainerStatus, now: float) -> bool:
        """Whether the core should get this status. Growing ages of the same snapshots do not count."""
        heard, key = self.servers[connection], (status.replica, status.rank)
        last = heard.get(key)
        if (
            last is not None
            and now - last.fed_at < STATUS_S
            and replace(last.status, number=status.number, ages_s=status.ages_s) == status
        ):
            return False
        heard[key] = HeardStatus(status, now)
        return True

    def server_closed(self, connection: MemberConnection) -> list[m.TrainerStatus]:
        """Forget this connection; return the newest status of each rank that has no other connection."""
        silent = []
        for key, heard in self.servers.pop(connection, {}).items():
            others = (statuses.get(key) for statuses in self.servers.values())
            if not any(x is not None and x.status.ckpt == heard.status.ckpt for x in others):
                silent.append(heard.status)
        return silent

    def notify_servers(self, text: str) -> None:
        frame = text_frame(text)
        for connection in self.servers:
            connection.send(frame)

    # --- the end ---------------------------------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        """Close every connection, a few per turn of the loop: the lease must be given back meanwhile."""
        connections = [*self.sessions.values(), *self.servers]
        self.sessions.clear()
        self.servers.clear()
        ends = WorkQueue(_ENDS_PER_TURN)
        for connection in connections:
            ends.add(partial(connection.end, code, reason))
