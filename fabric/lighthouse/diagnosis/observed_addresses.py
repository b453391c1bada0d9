"""The addresses from which a job's sessions and trainer statuses come, as the kernel reports them.

A member names the address of its checkpoint server. After a failure the lighthouse calls that address and
shows the job's token. It does so only if that member or its checkpoint server has connected from there.
Otherwise a member could make the lighthouse call any host in its network.

Each process also sends a secret, so that another process with the job's token cannot take over its session.
"""

import time
from dataclasses import dataclass, field

from fabric.protocol.messages.network import OpenSession
from fabric.runtime.http.token_file import is_same


@dataclass(slots=True)
class _Source:
    session: str = ""
    status: str = ""
    is_trusted: bool = False
    opened: float = 0.0  # Unix seconds of the newest session
    incarnation: int = -1
    secret: str = ""


@dataclass(slots=True)
class PeerAddresses:
    """Addresses by replica and rank. A session speaks for every rank of its replica, a status for one."""

    _sources: dict[tuple[str, int], _Source] = field(default_factory=dict)
    wrong_tokens: dict[str, float] = field(default_factory=dict)  # address -> Unix seconds of its newest one

    def token_refused(self, address: str) -> None:
        """Note that a process at this address has shown a wrong token for the job."""
        if len(self.wrong_tokens) < 1000 or address in self.wrong_tokens:
            self.wrong_tokens[address] = time.time()

    def refused_at(self, replica: str) -> float:
        """Return when a wrong token last came from the replica's address; 0 where a session has followed."""
        newest = max((self.wrong_tokens.get(address, 0.0) for address in self.of(replica, 0)), default=0.0)
        source = self._sources.get((replica, 0))
        return newest if source is None or newest > source.opened else 0.0

    def stranger(self, session: OpenSession) -> str:
        """Return why the session is not from the process that it claims, or an empty string.

        The incarnation alone proves nothing, because the job's status shows it.
        """
        source = self._sources.get((session.replica, 0))
        if source is None or not source.secret or source.incarnation != session.incarnation:
            return ""
        if is_same(session.secret, source.secret):
            return ""
        return (
            f"another process speaks for {session.replica} as incarnation {session.incarnation}: start with a"
            " replica name of your own"
        )

    def session(self, session: OpenSession, address: str, *, is_trusted: bool) -> None:
        """Note that a session was opened; ``is_trusted``: it showed the lighthouse's own token."""
        source = self._sources.setdefault((session.replica, 0), _Source())
        source.session, source.is_trusted, source.opened = address, is_trusted, time.time()
        source.incarnation, source.secret = session.incarnation, session.secret

    def status(self, replica: str, rank: int, address: str) -> None:
        """Note the address of a rank's checkpoint server."""
        self._sources.setdefault((replica, rank), _Source()).status = address

    def of(self, replica: str, rank: int) -> frozenset[str]:
        """Return the addresses from which the rank's processes have connected."""
        first, own = self._sources.get((replica, 0)), self._sources.get((replica, rank))
        return frozenset(filter(None, (first.session if first else "", own.status if own else "")))

    def is_trusted(self, replica: str) -> bool:
        """Whether the replica's newest session showed the lighthouse's own token."""
        source = self._sources.get((replica, 0))
        return source is not None and source.is_trusted
