"""Who is alive, from two sources: the trainer's session, and the status of its checkpoint server.

The kernel's word (gone, stopped) counts at once; silence counts only when both sources are silent, for
trainers may hold the GIL for long. A verdict is a sentence that says what was seen, or empty: alive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fabric.model import Death, Member, SnapshotRef, StepTimes
from fabric.protocol.messages.network import Heartbeat, OpenSession, TrainerStatus
from fabric.protocol.messages.rank_messages import rank_of_url

Process = TypeVar("Process", Member, OpenSession)

# Why a process has certainly ended.
GONE = "its process is gone"
FOUND_GONE = "a newer process of it has registered and found this one gone"

# Seconds. A greeting takes some five turns of the lighthouse's loop, and a member waits 2.7 s for it: where
# turns are longer than this nobody may get in.
BEHIND_S = 0.25


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Seconds. ``stopped_s``: how long a stopped trainer is waited for. ``reconnect_s``: how long a
    session may be away while the status says that the trainer runs. ``silence_s``: both sources silent.
    ``grace_s``: after an election, after the last return of a member, and after the last that was made to
    wait, by the door or by a leader that cannot keep up, nobody is dead for silence or absence.
    ``overload_s``: being made to wait counts so long at most."""

    stopped_s: float = 0.15
    reconnect_s: float = 3.0
    silence_s: float = 2.0
    lost_s: float = 0.05
    grace_s: float = 3.0
    overload_s: float = 300.0


@dataclass(slots=True)
class Peer:
    """One process's newest session and what it said; ``times`` are those of the last step that it told of."""

    session: OpenSession
    connected: bool
    seen: float
    opened: float = 0.0
    beat: Heartbeat | None = None
    times: StepTimes | None = None
    closed: float = 0.0

    @property
    def incarnation(self) -> int:
        return self.session.incarnation

    @property
    def step(self) -> int:
        return self.beat.step if self.beat is not None else self.session.step

    @property
    def generation(self) -> int:
        return self.beat.generation if self.beat is not None else self.session.generation

    @property
    def newest_epoch(self) -> int:
        """Of which it has heard."""
        return max(self.session.epoch, self.beat.epoch if self.beat is not None else 0)


@dataclass(slots=True)
class LastStatus:
    """One checkpoint server: what it last said of the trainer, and since when. ``taken``: when the
    state of each of ``snapshots`` was its trainer's; ``parts``: of how many ranks it is. ``closed``: when its
    connection ended."""

    incarnation: int
    trainer: str
    since: float
    seen: float
    connected: bool = True
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    deaths: tuple[Death, ...] = ()
    taken: tuple[float, ...] = ()
    durable: tuple[SnapshotRef, ...] = ()
    durable_error: str = ""
    parts: tuple[int, ...] = ()
    closed: float = 0.0

    def says(self, status: TrainerStatus) -> bool:
        """Whether this status tells the same of the same process."""
        return (self.incarnation, self.trainer) == (status.incarnation, status.trainer)


@dataclass(slots=True)
class Liveness:
    """Both sources; ``verdict`` and ``confirmed`` are pure functions of them and the time.
    ``late_s``: how much longer than usual silence is tolerated now, see ``tick_was_late``.

    A replica may have several processes at a time: the scheduler starts it elsewhere while the old one is
    only out of sight. ``peers`` and ``statuses`` hold the process and the server that count for each replica.
    ``former`` holds earlier processes that the record names, ``elsewhere`` the other servers of a replica,
    and ``ended`` why it is certain that a process has ended.
    """

    config: LivenessConfig
    elected: float
    peers: dict[str, Peer] = field(default_factory=dict)
    statuses: dict[str, LastStatus] = field(default_factory=dict)
    late_s: float = 0.0
    returned: float = -math.inf  # when a member was last heard for the first time after the election
    overloaded_until: float = -math.inf  # until when those who want to come back may be made to wait
    began: float = -math.inf  # when the generation did: of those in it silence counts from then on
    _late_before_s: float = 0.0
    # Of replicas of several ranks: rank (from 1) -> replica -> what that rank's checkpoint server says.
    rank_statuses: dict[int, dict[str, LastStatus]] = field(default_factory=dict)
    former: dict[tuple[str, int], Peer] = field(default_factory=dict)
    elsewhere: dict[str, dict[tuple[str, int], LastStatus]] = field(default_factory=dict)
    proven_ends: dict[tuple[str, int], str] = field(default_factory=dict)

    def opened(self, session: OpenSession, now: float, is_named: bool) -> None:
        """Take a session. Its predecessor's last contact is kept where the record names that process."""
        known = self.peers.get(session.replica)
        if known is not None and known.incarnation != session.incarnation and is_named:
            if known.connected:
                known.connected, known.closed = False, now
            self.former[session.replica, known.incarnation] = known
        self.peers[session.replica] = Peer(session, True, now, opened=now)

    def keep(self, roster: Sequence[Member]) -> None:
        """Forget of processes that have ended, or were replaced, all that this roster does not name."""
        if not (self.former or self.proven_ends or self.elsewhere):
            return
        named = {(x.replica, x.incarnation) for x in roster}
        self.former = {key: peer for key, peer in self.former.items() if key in named}
        self.proven_ends = {key: why for key, why in self.proven_ends.items() if key in named}
        for replica, servers in list(self.elsewhere.items()):
            left = {
                at: status
                for at, status in servers.items()
                if status.connected or (replica, status.incarnation) in named
            }
            self.elsewhere[replica] = left
            if not left:
                del self.elsewhere[replica]

    def came_back(self, now: float, first: bool = True, one_of_many: bool = False) -> None:
        """A member has a session again, the ``first`` time since the election or not. Thousands take longer
        than ``grace_s`` to come back, one after the other, and some more than once, for they wait for their
        turn in the kernel's queue only so long: the credit lasts until nobody has come for so long."""
        if now < self.grace_until:
            self.returned = now if first else self.returned
            if one_of_many:
                self.note_overload(now)

    def note_overload(self, until: float) -> None:
        """So many want to come back at once that some are made to wait until then: who is not here, or was
        here and is away again, may be among them."""
        self.overloaded_until = max(self.overloaded_until, until)

    @property
    def overload_grace_until(self) -> float:
        """Until then no absence is a death: each one made to wait has had its turn, and time to use it."""
        return min(self.overloaded_until, self.elected + self.config.overload_s) + self.config.grace_s

    @property
    def grace_until(self) -> float:
        """Until then nobody is dead for silence, or for not having come back."""
        return max(max(self.elected, self.returned) + self.config.grace_s, self.overload_grace_until)

    def tick_was_late(self, by_s: float, now: float) -> None:
        """The leader was called so much later than it asked: what it was told meanwhile may still lie before
        it, unread, so that silence is believed so much later. Two turns, for a message takes as many. And
        while members come back it may be for this that they do not get in: absence counts when the leader has
        kept up for as long as it takes to try again."""
        self.late_s, self._late_before_s = by_s + self._late_before_s, by_s
        if by_s >= BEHIND_S and now - by_s < self.grace_until:
            self.note_overload(now + self.config.reconnect_s)

    def statuses_of(self, rank: int) -> dict[str, LastStatus]:
        """By replica, of the checkpoint servers of this rank."""
        return self.rank_statuses.setdefault(rank, {}) if rank else self.statuses

    def hear(self, status: TrainerStatus, member: Member | None, now: float) -> LastStatus | None:
        """Take a status of a replica that the roster has as ``member``. Returns what was known of this server
        before."""
        statuses, key = self.statuses_of(status.rank), status.replica
        current, aside = statuses.get(key), self.elsewhere.get(key, {})
        at = (status.ckpt, status.rank)
        is_current = current is not None and current.ckpt == status.ckpt
        if is_current and current is not None and status.incarnation < current.incarnation:
            return current  # from before its newer trainer
        same_trainer = current is not None and current.incarnation == status.incarnation
        known = current if is_current or (same_trainer and at not in aside) else aside.get(at)
        state = _state_of(status, known, now)
        if current is not None and not is_current and not self._counts(status, current, member):
            self.elsewhere.setdefault(key, {})[at] = state
            return known
        if current is not None and not is_current:
            self.elsewhere.setdefault(key, {})[current.ckpt, status.rank] = current
        if at in aside:
            del aside[at]
        statuses[key] = state
        return known

    def _counts(self, status: TrainerStatus, current: LastStatus, member: Member | None) -> bool:
        """Whether this status is believed of its replica rather than that of ``current``, another server. A
        process that was let in (a session of it was taken, or the roster has it) is not silenced by one that
        was not: that may be a second one of the same id, which is refused. Else the newer one counts."""
        peer = self.peers.get(status.replica)
        let_in = {x.incarnation for x in (peer, member) if x is not None}
        if (status.incarnation in let_in) != (current.incarnation in let_in):
            return status.incarnation in let_in
        return status.incarnation >= current.incarnation

    def status_closed(
        self, replica: str, ckpt: str, rank: int, member: Member | None, now: float
    ) -> LastStatus | None:
        """The connection of this server has ended; returns the server where it is the one that counts. Of the
        others those are kept whose process the roster has as ``member``."""
        current, aside = self.statuses_of(rank).get(replica), self.elsewhere.get(replica, {})
        if current is not None and current.ckpt == ckpt:
            if current.connected:
                current.connected, current.closed = False, now
            return current
        other = aside.get((ckpt, rank))
        if other is not None and member is not None and other.incarnation == member.incarnation:
            other.connected, other.closed = False, now
        elif other is not None:
            del aside[ckpt, rank]
        return None

    def held(self) -> dict[SnapshotRef, set[str]]:
        """Every snapshot that a checkpoint server which is heard holds, and where: URLs of all ranks."""
        found: dict[SnapshotRef, set[str]] = {}
        for status in self._holders():
            for ref in status.snapshots:
                found.setdefault(ref, set()).add(status.ckpt)
        return found

    def age_s(self, state: SnapshotRef, now: float) -> float | None:
        """How long ago that state was the trainers', by who says the most; None where nobody says."""
        taken = [
            when
            for status in self._holders()
            for ref, when in zip(status.snapshots, status.taken, strict=False)
            if ref == state
        ]
        return now - min(taken) if taken else None

    def _holders(self) -> list[LastStatus]:
        """Checkpoint servers that are heard and say where they are, of all ranks."""
        return [status for status in self._servers() if status.connected and status.ckpt]

    def _servers(self) -> list[LastStatus]:
        """Every checkpoint server that has been heard, of all ranks."""
        counting = [s for table in (self.statuses, *self.rank_statuses.values()) for s in table.values()]
        return counting + [s for aside in self.elsewhere.values() for s in aside.values()]

    def heard_servers(self) -> set[str]:
        """The URLs of all checkpoint servers that are heard now."""
        return {status.ckpt for status in self._servers() if status.connected}

    def servers_to_hear(self, roster: Sequence[Member], now: float) -> dict[str, float]:
        """Checkpoint servers that the roster or a session names and that are not heard, by URL: until when
        each is waited for. It may hold the newest state, and connect again in a moment."""
        heard = self.heard_servers()
        closed = {status.ckpt: status.closed for status in self._servers() if not status.connected}
        named = [(member, self.elected) for member in roster]
        named += [
            (as_member(p.session), max(self.elected, p.opened)) for p in self.peers.values() if p.connected
        ]
        found: dict[str, float] = {}
        for member, since in named:
            for rank, address in enumerate(member.addresses):
                status = self._status(member, rank)
                if address.ckpt in heard or (status is not None and status.connected) or not address.ckpt:
                    continue
                until = max(since, closed.get(address.ckpt, since)) + self.config.grace_s
                until = max(until, self.overload_grace_until)
                if now < until:
                    found[address.ckpt] = max(until, found.get(address.ckpt, until))
        return found

    def durable(self) -> set[SnapshotRef]:
        """Every durable checkpoint that anybody has found or written. Whoever wrote it may be gone by now."""
        found = {ref for peer in self.peers.values() for ref in peer.session.durable}
        return found | {ref for status in self._servers() for ref in status.durable}

    def whole(self, ranks: int) -> dict[SnapshotRef, set[str]]:
        """Those of ``held`` of which every lane has a living holder, whichever replicas those are in.
        ``ranks``: how many lanes a state has where nobody says it."""
        parts = {
            ref: count
            for status in self._holders()
            for ref, count in zip(status.snapshots, status.parts, strict=False)
        }
        return {ref: urls for ref, urls in self.held().items() if lanes(urls) >= parts.get(ref, ranks)}

    def freshest(self, ranks: int) -> SnapshotRef | None:
        """The newest state that could be recovered now; ``ranks`` as in ``whole``."""
        return max(self.whole(ranks), key=lambda ref: (ref.generation, ref.step, ref.digest), default=None)

    def ckpts(self, member: Member) -> list[str]:
        """Where the checkpoint server of each rank is, by its own word where it has spoken."""
        found = []
        for rank, address in enumerate(member.addresses):
            status = self._status(member, rank)
            found.append(status.ckpt if status is not None and status.ckpt else address.ckpt)
        return found

    def rank_trouble(self, member: Member, now: float) -> str:
        """Why a rank other than 0 holds its replica up or has ended it, or empty. It is no proof that rank 0,
        which decides, has ended too."""
        for rank in range(1, len(member.addresses)):
            status = self._status(member, rank)
            if status is None or not status.connected:
                continue
            if status.trainer == "gone":
                return f"the process of its rank {rank} is gone"
            if status.trainer == "stopped" and now - status.since >= self.config.stopped_s:
                return f"the process of its rank {rank} has been stopped for {now - status.since:.2f} s"
        return ""

    def failure_reason(self, member: Member, now: float) -> str:
        """Why this member counts as dead, or empty."""
        if not self.suspects((member,), now):
            return ""
        said = self.kernel_evidence(member, now)
        if said:
            return said
        config, status, credit = self.config, self._status(member), now < self.grace_until
        heard = self._status_heard(status, now) or (credit and status is None)
        peer = self._peer(member)
        away = peer is None or not peer.connected
        if (peer is None and credit) or (away and now < self.overload_grace_until):
            return ""
        if peer is None or not peer.connected:
            since = self.grace_until if peer is None else max(peer.closed, self.overload_grace_until)
            patience = config.reconnect_s if heard else config.lost_s
            return f"its session ended {now - since:.2f} s ago" if now - since >= patience else ""
        silent_s = now - max(peer.seen, self.began)
        if not heard and not credit and silent_s >= config.silence_s + self.late_s:
            return f"its host has been silent for {silent_s:.2f} s"
        return ""

    def kernel_evidence(self, member: Member, now: float) -> str:
        """What its host's kernel says against it, which counts at once, or empty. Silence is no such word."""
        confirmed = self.proven_dead(member)
        if confirmed:
            return confirmed
        status = self._status(member)
        stopped = status is not None and status.connected and status.trainer == "stopped"
        if status is not None and stopped and now - status.since >= self.config.stopped_s:
            return f"its trainer has been stopped for {now - status.since:.2f} s"
        return self.rank_trouble(member, now)

    def suspects(self, roster: Sequence[Process], now: float) -> list[Process]:
        """Those that have to be looked at more closely, found without looking at everything: of nearly
        everybody nearly always the session is there and was heard, or need not be back yet, and its
        checkpoint server says nothing else. One loop without calls, for there are thousands several times a
        second."""
        peers, statuses, since = self.peers, self.statuses, now - self.config.silence_s
        credit = now < self.grace_until
        found = []
        for member in roster:
            peer = peers.get(member.replica)
            if not member.ranks and (
                credit
                if peer is None
                else peer.connected and peer.seen > since and peer.session.incarnation == member.incarnation
            ):
                status = statuses.get(member.replica)
                if status is None or status.trainer == "running":
                    continue
            found.append(member)
        return found

    def suspicion(self, session: OpenSession, now: float) -> str:
        """Why the process of this session would be evicted at once if it were in a roster, or empty."""
        return self.failure_reason(as_member(session), now) if self.suspects((session,), now) else ""

    def proven_dead(self, member: Member) -> str:
        """Why it is certain that this process has ended, or empty."""
        status, newest = self._status(member), self.peers.get(member.replica)
        if status is not None and status.trainer == "gone":
            return GONE
        if newest is not None and newest.incarnation > member.incarnation and vouches(newest.session, member):
            return FOUND_GONE
        return self.proven_ends.get((member.replica, member.incarnation), "")

    def note_end(self, member: Member) -> None:
        """Remember of this process, which the record names, that it has ended, where that is certain now."""
        why = self.proven_dead(member)
        if why:
            self.proven_ends[member.replica, member.incarnation] = why

    def out_of_contact(self, member: Member, now: float, limit_s: float) -> bool:
        """Whether nothing was heard of this process for ``limit_s`` (from the election on)."""
        return now - self.last_contact(member, now) >= limit_s

    def last_contact(self, member: Member, now: float) -> float:
        """When this process was last heard of, the election at the earliest."""
        peer, status = self._peer(member), self._status(member)
        heard = [self.elected]
        if peer is not None:
            heard.append(now if peer.connected else peer.closed)
        if status is not None and status.trainer != "gone":
            heard.append(status.seen)
        return max(heard)

    def heard_at(self, member: Member) -> float:
        """When its trainer or its checkpoint server last said anything; -inf where neither has."""
        peer, status = self._peer(member), self._status(member)
        return max((x.seen for x in (peer, status) if x is not None), default=-math.inf)

    def next_check(self, roster: tuple[Member, ...], now: float) -> float | None:
        """When a verdict may change by time alone: soon while anybody is in doubt, else in a while."""
        for member in self.suspects(roster, now):
            peer, status = self._peer(member), self._status(member)
            stopped = status is not None and status.trainer == "stopped"
            for statuses in self.rank_statuses.values():
                other = statuses.get(member.replica)
                stopped = stopped or (other is not None and other.trainer == "stopped")
            away = (peer is None or not peer.connected) and now >= self.overload_grace_until
            if away or stopped:
                return now + self.config.lost_s / 2
        soon = now + self.config.silence_s / 4
        return min(soon, self.grace_until) if now < self.grace_until else soon

    def says_running(self, member: Member, now: float) -> bool:
        """Whether the checkpoint server of this very process is heard, and says that it runs."""
        status = self._status(member)
        return status is not None and self._status_heard(status, now) and status.trainer == "running"

    def _peer(self, member: Member) -> Peer | None:
        peer = self.peers.get(member.replica)
        if peer is not None and peer.incarnation == member.incarnation:
            return peer
        return self.former.get((member.replica, member.incarnation))

    def _status(self, member: Member, rank: int = 0) -> LastStatus | None:
        """What the checkpoint server of this very process says."""
        current = self.statuses_of(rank).get(member.replica)
        if current is not None and current.incarnation == member.incarnation:
            return current
        aside = self.elsewhere.get(member.replica)
        of_it = [
            p for (_, r), p in (aside or {}).items() if r == rank and p.incarnation == member.incarnation
        ]
        return max(of_it, key=lambda status: (status.connected, status.seen), default=None)

    def _status_heard(self, status: LastStatus | None, now: float) -> bool:
        return status is not None and status.connected and now - status.seen < self.config.silence_s


def _state_of(status: TrainerStatus, known: LastStatus | None, now: float) -> LastStatus:
    """The status as it is kept, where the server was ``known`` before."""
    return LastStatus(
        incarnation=status.incarnation,
        trainer=status.trainer,
        since=known.since if known is not None and known.says(status) else now,
        seen=now,
        ckpt=status.ckpt,
        snapshots=status.snapshots,
        deaths=status.deaths,
        taken=tuple(now - age_s for age_s in status.ages_s) if status.ages_s else (),
        durable=status.durable or (known.durable if known is not None else ()),
        durable_error=status.durable_error,
        parts=status.parts,
    )


def vouches(session: OpenSession, member: Member) -> bool:
    """Whether this process has seen on its own host that that one, of the same replica, has ended."""
    return member.incarnation in session.predecessors


def lanes(urls: set[str]) -> int:
    """How many ranks these servers have between them, counted from rank 0 without a gap."""
    ranks = {rank_of_url(url) for url in urls}
    return next(n for n in range(len(ranks) + 1) if n not in ranks)


def as_member(session: OpenSession) -> Member:
    """The roster entry of a session."""
    return Member(
        replica=session.replica,
        incarnation=session.incarnation,
        link=session.link,
        ckpt=session.ckpt,
        shares=session.shares,
        layout=session.layout,
        data_slot=session.data_slot,
        ranks=session.ranks,
        rack=session.rack,
    )
