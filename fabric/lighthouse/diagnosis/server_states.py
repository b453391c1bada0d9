"""Faults of checkpoint servers: a server is silent although its trainer sends heartbeats, or durable
checkpoints fail. An event says when a fault begins and when it ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fabric.model import Member, SnapshotRef
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.liveness import Liveness
from fabric.protocol.leader.server_statuses import LastStatus
from fabric.protocol.messages.network import TrainerStatus

# A server sends a status every quarter of a second, in large jobs every second.
SILENT_S = 5.0


@dataclass(slots=True)
class HeardStatus:
    """The newest status of one rank over one connection, and when the core heard it."""

    status: TrainerStatus
    fed_at: float


@dataclass(slots=True)
class CheckpointServers:
    """The checkpoint servers of one job. ``failing``: why a replica's last durable checkpoint was not
    written; cleared when a replica writes a checkpoint."""

    failing: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    _newest: SnapshotRef | None = None
    _errors: dict[str, str] = field(default_factory=dict)

    def look(self, core: LeaderCore, now: float, note: Callable[[str, str, str], None]) -> None:
        """Look for changes, and ``note`` each as an event (kind, replica, why)."""
        self._look_at_storage(core.state.liveness)
        record = core.state.record
        roster = record.roster if record is not None and not record.complete and not record.failed else ()
        live = core.state.liveness
        silent = {x.replica: sentence for x in roster if (sentence := silence(live, x, now))}
        for replica, sentence in silent.items():
            if replica not in self.silent:
                note("server silent", replica, sentence)
        for replica in sorted(self.silent - silent.keys()):
            if any(member.replica == replica for member in roster):
                note("server heard", replica, "its checkpoint server answers again")
        self.silent = set(silent)

    def _look_at_storage(self, liveness: Liveness) -> None:
        newest = max(liveness.durable(), key=lambda ref: (ref.generation, ref.step), default=None)
        statuses = liveness.statuses().items()
        errors = {name: status.durable_error for name, status in statuses if status.durable_error}
        if newest != self._newest:
            self.failing.clear()
        for name, error in errors.items():
            if self._errors.get(name) != error:
                self.failing[name] = error
        self.failing = {name: error for name, error in self.failing.items() if name in errors}
        self._newest, self._errors = newest, errors


def silence(liveness: Liveness, member: Member, now: float) -> str:
    """Say that this member's checkpoint server is silent while its trainer beats, or return an empty text."""
    peer = liveness.peers.get(member.replica)
    if peer is None or not peer.connected or peer.incarnation != member.incarnation:
        return ""
    for rank, status in _statuses(liveness, member):
        quiet_s = now - status.seen
        if status.incarnation == member.incarnation and quiet_s >= SILENT_S + liveness.late_s:
            whose = f"the checkpoint server of its rank {rank}" if rank else "its checkpoint server"
            return f"{whose} has not answered for {quiet_s:.0f} s"
    return ""


def _statuses(liveness: Liveness, member: Member) -> Iterator[tuple[int, LastStatus]]:
    for rank in range(len(member.addresses)):
        status = liveness.statuses(rank).get(member.replica)
        if status is not None:
            yield rank, status
