"""Verdicts about processes, from two sources: trainers' sessions, and checkpoint servers' statuses.

The kernel's word (gone, stopped) counts at once. Silence counts only when both sources are silent, because
trainers may hold the GIL for long. A verdict is a sentence with the evidence, or empty: alive.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Death, Member, Policy, ReplicaProcess, SnapshotRef, StepTimes, Value
from fabric.protocol.messages.leader_events import SessionOpened
from fabric.protocol.messages.network import Heartbeat, OpenSession, TrainerStatus
from fabric.protocol.messages.rank_messages import rank_of_url

# A stopped trainer counts as running again after it has run for this many seconds without another stop.
STOP_CALM_S = 10.0
# The most replicas outside the roster, without a connection, whose last words are kept.
MOST_GONE = 256


class LastStatus(Struct):
    """The last status from one checkpoint server."""

    incarnation: int
    trainer: str
    since: float  # when the server first reported this trainer state of this process
    seen: float
    connected: bool = True
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    deaths: tuple[Death, ...] = ()
    taken: tuple[float, ...] = ()  # for each snapshot, the time at which the trainer had that state
    durable: tuple[SnapshotRef, ...] = ()
    durable_error: str = ""
    parts: tuple[int, ...] = ()  # for each snapshot in ``snapshots``, the number of ranks that hold a part
    closed: float = 0.0  # the time when the checkpoint server's connection ended
    stops: int = 0  # stops of this process since it last ran for ``STOP_CALM_S``

    def says(self, status: TrainerStatus) -> bool:
        """Whether ``status`` reports the same trainer state of the same process."""
        return (self.incarnation, self.trainer) == (status.incarnation, status.trainer)


class ServerStatuses(Struct):
    """The statuses by rank and replica, and those of the replicas' other servers."""

    counting: dict[int, dict[str, LastStatus]] = field(default_factory=lambda: {0: {}})
    # replica -> the URL and the rank of another server of this replica -> its status
    elsewhere: dict[str, dict[tuple[str, int], LastStatus]] = field(default_factory=dict)
    # Replica and rank of unconnected servers of which no epoch and no session knows, oldest first.
    strangers: dict[tuple[str, int], None] = field(default_factory=dict)
    # replica -> its ranks above 0 of which some server's last status may say that the trainer does not run
    troubled: dict[str, set[int]] = field(default_factory=dict)

    def of_rank(self, rank: int) -> dict[str, LastStatus]:
        """Replica -> the status that counts of its checkpoint server of this rank."""
        return self.counting.setdefault(rank, {})

    def hear(self, status: TrainerStatus, let_in: Collection[int], now: float) -> LastStatus | None:
        """Take a status; return this server's last status.

        ``let_in``: the incarnations of this replica that have a session or a roster entry. They count before
        a process without, which may be a second one of the same replica id. Otherwise the newer process
        counts.
        """
        statuses, key = self.of_rank(status.rank), status.replica
        current, aside = statuses.get(key), self.elsewhere.get(key, {})
        at = (status.ckpt, status.rank)
        is_current = current is not None and current.ckpt == status.ckpt
        if is_current and current is not None and status.incarnation < current.incarnation:
            return current  # the status is old: this server has a newer trainer now
        same_trainer = current is not None and current.incarnation == status.incarnation
        before = current if is_current or (same_trainer and at not in aside) else aside.get(at)
        after = LastStatus(
            incarnation=status.incarnation,
            trainer=status.trainer,
            since=before.since if before is not None and before.says(status) else now,
            seen=now,
            ckpt=status.ckpt,
            snapshots=status.snapshots,
            deaths=status.deaths,
            taken=tuple(now - age_s for age_s in status.ages_s),
            durable=status.durable or (before.durable if before is not None else ()),
            durable_error=status.durable_error,
            parts=status.parts,
            stops=stops_after(before, status, now),
        )
        self.strangers.pop((key, status.rank), None)
        self._note_trouble(status, bool(aside) or not (same_trainer or current is None))
        if current is not None and not is_current:
            rank_of_new = (status.incarnation in let_in, status.incarnation)
            if rank_of_new < (current.incarnation in let_in, current.incarnation):
                self.elsewhere.setdefault(key, {})[at] = after
                return before
            self.elsewhere.setdefault(key, {})[current.ckpt, status.rank] = current
        if at in aside:
            del aside[at]
        statuses[key] = after
        return before

    def says_other_gone(self, status: TrainerStatus) -> bool:
        """Whether another rank of the process in ``status`` is known to have ended."""
        for rank in chain((0,), self.troubled.get(status.replica, ())):
            other = self.of_rank(rank).get(status.replica)
            if rank != status.rank and other is not None and other.says(status):
                return True
        return False

    def hear_again(self, status: TrainerStatus, now: float) -> bool:
        """Take the word that ``status``, which was heard before, still holds.

        Return False, and take nothing, where ``hear`` may find more to do than to note the time.
        """
        last = self.of_rank(status.rank).get(status.replica)
        if (
            last is None
            or last.ckpt != status.ckpt
            or not (last.says(status) and last.connected)
            or last.stops
            or (status.replica, status.rank) in self.strangers
        ):
            return False
        last.seen = now
        return True

    def _note_trouble(self, status: TrainerStatus, has_others: bool) -> None:
        """Note whether to look at this rank's statuses: there may be many ranks, and few are in trouble."""
        ranks = self.troubled.get(status.replica, set())
        if status.rank and status.trainer != "running":
            self.troubled.setdefault(status.replica, ranks).add(status.rank)
        elif status.rank in ranks and not has_others:
            ranks.discard(status.rank)

    def closed(
        self, replica: str, ckpt: str, rank: int, member: Member | None, now: float
    ) -> LastStatus | None:
        """Note that the connection of this server has ended; return its last status if that status counts.

        Of the replica's other servers keep those whose process the roster lists as ``member``.
        """
        current, aside = self.of_rank(rank).get(replica), self.elsewhere.get(replica, {})
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

    def forget_stranger(self, replica: str, rank: int) -> None:
        """Forget an unconnected server that no epoch and no session names; evidence of MOST_GONE stays."""
        status = self.of_rank(rank).get(replica)
        # A process that has not trained in this job has a state of generation 0.
        if status and (status.deaths or status.durable or any(x.generation for x in status.snapshots)):
            self.strangers[replica, rank] = None
            if len(self.strangers) <= MOST_GONE:
                return
            replica, rank = next(iter(self.strangers))
            del self.strangers[replica, rank]
        status = self.of_rank(rank).get(replica)
        if status is not None and not status.connected:
            del self.counting[rank][replica]
        if rank and not self.counting[rank]:
            del self.counting[rank]

    def keep(self, named: Collection[ReplicaProcess]) -> None:
        """Forget the other servers of processes that are not in ``named``, once they are gone."""
        left = {
            replica: {
                at: status
                for at, status in servers.items()
                if status.connected or (replica, status.incarnation) in named
            }
            for replica, servers in self.elsewhere.items()
        }
        self.elsewhere = {replica: servers for replica, servers in left.items() if servers}

    def of_process(self, member: Member, rank: int = 0) -> LastStatus | None:
        """The last status about exactly this process."""
        current = self.of_rank(rank).get(member.replica)
        if current is not None and current.incarnation == member.incarnation:
            return current
        aside = self.elsewhere.get(member.replica)
        of_it = [
            p for (_, r), p in (aside or {}).items() if r == rank and p.incarnation == member.incarnation
        ]
        return max(of_it, key=lambda status: (status.connected, status.seen), default=None)

    def urls_of(self, member: Member) -> list[str]:
        """The URL of each rank's checkpoint server: from its status, or without a status from the roster."""
        urls = []
        for rank, address in enumerate(member.addresses):
            status = self.of_process(member, rank)
            urls.append(status.ckpt if status is not None and status.ckpt else address.ckpt)
        return urls

    def heard_urls(self) -> set[str]:
        """The URLs of all connected checkpoint servers."""
        return {status.ckpt for status in self._all() if status.connected}

    def closed_urls(self) -> dict[str, float]:
        """URL of each unconnected checkpoint server -> when its connection ended."""
        return {status.ckpt: status.closed for status in self._all() if not status.connected}

    def held(self) -> dict[SnapshotRef, set[str]]:
        """Every snapshot in connected checkpoint servers (of all ranks), with the URLs of these servers."""
        urls: dict[SnapshotRef, set[str]] = {}
        for status in self._holders():
            for ref in status.snapshots:
                urls.setdefault(ref, set()).add(status.ckpt)
        return urls

    def age_s(self, state: SnapshotRef, now: float) -> float | None:
        """How many seconds ago trainers had this state, at most; None if no server reports it."""
        pairs = (x for status in self._holders() for x in zip(status.snapshots, status.taken, strict=False))
        taken = [when for ref, when in pairs if ref == state]
        return now - min(taken) if taken else None

    def durable(self) -> set[SnapshotRef]:
        """Every durable checkpoint that a server has written or found."""
        return {ref for status in self._all() for ref in status.durable}

    def forget_storage(self) -> None:
        """Forget the durable checkpoints that trainers of the past have written."""
        for status in self._all():
            status.durable = ()

    def whole(self, ranks: int) -> dict[SnapshotRef, set[str]]:
        """The snapshots in ``held`` of which each rank's part has a living holder, in any replica.

        A snapshot has ``ranks`` parts unless a server reports another number. One snapshot may lie in several
        layouts of ranks, which have different numbers of parts.
        """
        holders: dict[tuple[SnapshotRef, int], set[str]] = {}  # (snapshot, number of parts) -> servers
        for status in self._holders():
            for ref, count in zip_longest(status.snapshots, status.parts[: len(status.snapshots)]):
                holders.setdefault((ref, count or ranks), set()).add(status.ckpt)
        complete = {ref for (ref, count), urls in holders.items() if lanes(urls) >= count}
        return {ref: urls for ref, urls in self.held().items() if ref in complete}

    def freshest(self, ranks: int) -> SnapshotRef | None:
        """The newest state of which servers hold every part now; ``ranks`` as in ``whole``."""
        return max(self.whole(ranks), key=lambda ref: (ref.generation, ref.step, ref.digest), default=None)

    def _holders(self) -> list[LastStatus]:
        """The last statuses of connected checkpoint servers with a URL, of all ranks."""
        return [status for status in self._all() if status.connected and status.ckpt]

    def _all(self) -> list[LastStatus]:
        """The last status of every checkpoint server, of all ranks."""
        counting = [s for table in self.counting.values() for s in table.values()]
        return counting + [s for aside in self.elsewhere.values() for s in aside.values()]


def stops_after(before: LastStatus | None, status: TrainerStatus, now: float) -> int:
    """The number of stops of this process, after ``status``, since it last ran for a while."""
    earlier = before.stops if before is not None and before.incarnation == status.incarnation else 0
    if status.trainer == "stopped":
        return earlier if earlier and before is not None and before.says(status) else earlier + 1
    is_calm = before is not None and before.says(status) and now - before.since >= STOP_CALM_S
    return 0 if is_calm else earlier


def lanes(urls: set[str]) -> int:
    """How many ranks, counted from rank 0 without a gap, these servers belong to."""
    ranks = {rank_of_url(url) for url in urls}
    return next(n for n in range(len(ranks) + 1) if n not in ranks)


Named = TypeVar("Named", Member, OpenSession)

# Reasons why a process has certainly ended.
GONE = "its process is gone"
FOUND_GONE = "a newer process of it has registered and found this one gone"

# The longest turn of the lighthouse's loop, in seconds, with which members get in: a greeting takes some five
# turns, and a member waits 2.7 s for its greeting.
BEHIND_S = 0.25


class LivenessConfig(Value):
    """Times in seconds."""

    stopped_s: float = 0.15  # how long the job waits for a stopped trainer
    reconnect_s: float = 3.0  # how long a session may be away while the status says that the trainer runs
    silence_s: float = 2.0  # how long both sources of liveness may be silent
    lost_s: float = 0.05  # how long a session may be away in other cases
    # For this long after an election, a member's return, or a wait in an overload, silence proves no death.
    grace_s: float = 3.0
    overload_s: float = 300.0  # seconds after the election in which waits of returning members count


class Peer(Struct):
    """One process's newest session, and the messages over it."""

    session: OpenSession
    connected: bool
    seen: float
    opened: float = 0.0
    beat: Heartbeat | None = None
    times: StepTimes | None = None  # times of the last step that the member reported
    closed: float = 0.0
    policy: Policy | None = None  # the numbers of replicas that its process asks for

    def close(self, now: float) -> None:
        self.connected, self.closed = False, now

    def hear(self, now: float) -> None:
        self.seen = now

    def take(self, beat: Heartbeat) -> None:
        self.beat, self.times = beat, beat.times or self.times

    @property
    def incarnation(self) -> int:
        return self.session.incarnation

    @property
    def process(self) -> ReplicaProcess:
        return ReplicaProcess(self.session.replica, self.session.incarnation)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step of its loop now."""
        return (self.beat.micro_batches if self.beat is not None else 0) or self.session.micro_batches

    @property
    def step(self) -> int:
        return self.beat.step if self.beat is not None else self.session.step

    @property
    def generation(self) -> int:
        return self.beat.generation if self.beat is not None else self.session.generation

    @property
    def newest_epoch(self) -> int:
        return max(self.session.epoch, self.beat.epoch if self.beat is not None else 0)


class Liveness(Struct):
    """Sessions and statuses. A verdict is a pure function of them and the time.

    A replica may have several processes at a time: the scheduler may start a second one on another host while
    the first one is only out of contact.
    """

    config: LivenessConfig
    elected: float
    peers: dict[str, Peer] = field(default_factory=dict)  # replica -> the session of its newest process
    servers: ServerStatuses = field(default_factory=ServerStatuses)
    late_s: float = 0.0  # how much longer silence is tolerated now, see ``tick_was_late``
    returned: float = -math.inf  # when a member last opened its first session after the election
    overloaded_until: float = -math.inf  # the time until which returning members may have to wait
    began: float = -math.inf  # the time when the generation began: silence of its members counts from then
    _late_before_s: float = 0.0
    former: dict[ReplicaProcess, Peer] = field(default_factory=dict)  # replaced, but in the record
    proven_ends: dict[ReplicaProcess, str] = field(default_factory=dict)  # process -> why it has surely ended

    def opened(self, event: SessionOpened, now: float, is_named: bool) -> Peer:
        """Take a session. Keep its predecessor's last contact if the record names that process."""
        session, former = event.session, self.peers.get(event.session.replica)
        if former is not None and former.incarnation != session.incarnation and is_named:
            if former.connected:
                former.close(now)
            self.former[former.process] = former
        self.peers[session.replica] = peer = Peer(session, True, now, opened=now, policy=event.policy)
        self.proven_ends.pop(peer.process, None)  # a person may have called a host gone that returns
        return peer

    def begin_term(self, now: float) -> None:
        """Let absence count from now on: this leader begins, or was stopped itself."""
        self.elected = now

    def begin_generation(self, now: float) -> None:
        self.began = now

    def note_proof(self, process: ReplicaProcess, why: str) -> None:
        self.proven_ends[process] = why

    def keep(self, roster: Sequence[Member]) -> None:
        """Forget processes that ended or were replaced, unless this roster names them."""
        if not (self.former or self.proven_ends or self.servers.elsewhere):
            return
        named = {x.process for x in roster}
        self.former = {key: peer for key, peer in self.former.items() if key in named}
        self.proven_ends = {key: why for key, why in self.proven_ends.items() if key in named}
        self.servers.keep(named)

    def came_back(self, now: float, first: bool = True, one_of_many: bool = False) -> None:
        """Note that a member has a session again; ``first``: for the first time since the election.

        Thousands of members take longer than ``grace_s`` to come back, and some come more than once. So the
        grace period lasts until no member has come for ``grace_s``.
        """
        if now < self.grace_until:
            self.returned = now if first else self.returned
            if one_of_many:
                self.note_overload(now)

    def note_overload(self, until: float) -> None:
        """Note that some members, perhaps absent ones too, may have to wait until ``until``."""
        self.overloaded_until = max(self.overloaded_until, until)

    @property
    def overload_grace_until(self) -> float:
        """The time until which no absent member counts as dead: members that had to wait may still come."""
        return min(self.overloaded_until, self.elected + self.config.overload_s) + self.config.grace_s

    @property
    def grace_until(self) -> float:
        """The time until which no member counts as dead for silence or absence."""
        return max(max(self.elected, self.returned) + self.config.grace_s, self.overload_grace_until)

    def tick_was_late(self, by_s: float, now: float) -> None:
        """Note that the leader was called ``by_s`` later than it asked.

        Messages may lie unread for two turns, so the leader tolerates silence for that much longer. The delay
        may also keep returning members out. So absence counts only after a time without delay.
        """
        self.late_s, self._late_before_s = by_s + self._late_before_s, by_s
        if by_s >= BEHIND_S and now - by_s < self.grace_until:
            self.note_overload(now + self.config.reconnect_s)

    def hear(self, status: TrainerStatus, member: Member | None, now: float) -> LastStatus | None:
        """Take a status of a replica whose roster entry is ``member``; return this server's last status."""
        peer = self.peers.get(status.replica)
        self._disprove_end(status)
        return self.servers.hear(status, {x.incarnation for x in (peer, member) if x is not None}, now)

    def hear_again(self, status: TrainerStatus, now: float) -> bool:
        """Take the word that a status still holds: see ``ServerStatuses.hear_again``."""
        self._disprove_end(status)
        return status.ended is None and self.servers.hear_again(status, now)

    def _disprove_end(self, status: TrainerStatus) -> None:
        if self.proven_ends and status.trainer == "running" and not status.rank:
            self.proven_ends.pop(status.process, None)

    def ranks_of(self, replica: str, member: Member | None) -> int:
        """Return how many ranks of this replica its session or its roster entry names; 0 without them."""
        peer = self.peers.get(replica)
        ranks = len(member.addresses) if member is not None else 0
        return max(ranks, 1 + len(peer.session.ranks)) if peer is not None else ranks

    def forget_strangers(self, names: Collection[str]) -> None:
        """Of the replicas outside ``names`` whose session has ended, keep those that ended last."""
        if len(self.peers) <= len(names) + MOST_GONE:
            return
        named = frozenset(names)
        gone = [name for name, peer in self.peers.items() if not peer.connected and name not in named]
        gone.sort(key=lambda name: self.peers[name].closed)
        for name in gone[:-MOST_GONE]:
            for rank in range(1 + len(self.peers.pop(name).session.ranks)):
                self.servers.forget_stranger(name, rank)

    def statuses(self, rank: int = 0) -> Mapping[str, LastStatus]:
        """Replica -> the newest status from the checkpoint server of this rank."""
        return self.servers.counting.get(rank, {})

    def durable(self) -> set[SnapshotRef]:
        """Every durable checkpoint that a process has found or written, also if that process has ended."""
        found_by_members = {ref for peer in self.peers.values() for ref in peer.session.durable}
        return found_by_members | self.servers.durable()

    def forget_storage(self) -> None:
        """Forget the durable checkpoints that only processes without a session have named."""
        for peer in self.peers.values():
            if not peer.connected:
                peer.session = replace(peer.session, durable=())
        self.servers.forget_storage()

    def servers_to_hear(self, roster: Sequence[Member], now: float) -> dict[str, float]:
        """URL of each unconnected checkpoint server that may hold the newest state -> until when to wait.

        Replicas outside the roster may hold it too. "" stands for servers that this leader has never heard.
        """
        grace_s, heard = self.config.grace_s, self.servers.heard_urls()
        named = [(member, self.elected) for member in roster]
        named += [
            (as_member(p.session), max(self.elected, p.opened)) for p in self.peers.values() if p.connected
        ]
        waits = {url: ended + grace_s for url, ended in self.servers.closed_urls().items()}
        waits[""] = max(self.elected + grace_s, self.overload_grace_until)
        for member, since in named:
            until = max(since + grace_s, self.overload_grace_until)
            for rank, address in enumerate(member.addresses):
                status = self.servers.of_process(member, rank)
                if address.ckpt and (status is None or not status.connected):
                    waits[address.ckpt] = max(until, waits.get(address.ckpt, until))
        return {url: until for url, until in waits.items() if now < until and url not in heard}

    def rank_trouble(self, member: Member, now: float) -> str:
        """Why a rank other than 0 stops its replica, or empty. It does not prove that rank 0 has ended."""
        for rank in sorted(self.servers.troubled.get(member.replica, ())):
            status = self.servers.of_process(member, rank)
            if rank > len(member.ranks) or status is None or not status.connected:
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
        evidence = self.kernel_evidence(member, now)
        if evidence:
            return evidence
        config, status, credit = self.config, self.servers.of_process(member), now < self.grace_until
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
        """The evidence of its host's kernel against this member, which counts at once, or empty."""
        confirmed = self.proven_dead(member)
        if confirmed:
            return confirmed
        status = self.servers.of_process(member)
        stopped = status is not None and status.connected and status.trainer == "stopped"
        if status is not None and stopped and now - status.since >= self.config.stopped_s:
            return f"its trainer has been stopped for {now - status.since:.2f} s"
        return self.rank_trouble(member, now)

    def suspects(self, roster: Sequence[Named], now: float) -> list[Named]:
        """The members of ``roster`` that need a closer look.

        Nearly all members need no closer look. The loop makes no calls, because it goes over thousands of
        members several times a second.
        """
        peers, statuses, since = self.peers, self.servers.of_rank(0), now - self.config.silence_s
        troubled = self.servers.troubled
        credit = now < self.grace_until
        doubtful = []
        for member in roster:
            peer = peers.get(member.replica)
            if not troubled.get(member.replica) and (
                credit
                if peer is None
                else peer.connected and peer.seen > since and peer.session.incarnation == member.incarnation
            ):
                status = statuses.get(member.replica)
                if status is None or status.trainer == "running":
                    continue
            doubtful.append(member)
        return doubtful

    def suspicion(self, session: OpenSession, now: float) -> str:
        """Why the process of this session would be evicted at once if it were in a roster, or empty."""
        return self.failure_reason(as_member(session), now) if self.suspects((session,), now) else ""

    def proven_dead(self, member: Member) -> str:
        """Why it is certain that this process has ended, or empty."""
        status, newest = self.servers.of_process(member), self.peers.get(member.replica)
        if status is not None and status.trainer == "gone":
            return GONE
        if newest is not None and newest.incarnation > member.incarnation and vouches(newest.session, member):
            return FOUND_GONE
        return self.proven_ends.get(member.process, "")

    def note_end(self, member: Member) -> None:
        """Remember that this process, which the record names, has ended, if that is certain now."""
        why = self.proven_dead(member)
        if why:
            self.proven_ends[member.process] = why

    def out_of_contact(self, member: Member, now: float, limit_s: float) -> bool:
        """Whether nothing was heard of this process for ``limit_s``, counted from the election or later."""
        return now - self.last_contact(member, now) >= limit_s

    def last_contact(self, member: Member, now: float) -> float:
        """When the leader last heard of this process; the time of its election if it has not heard of it."""
        peer, status = self._peer(member), self.servers.of_process(member)
        heard = [self.elected]
        if peer is not None:
            heard.append(now if peer.connected else peer.closed)
        if status is not None and status.trainer != "gone":
            heard.append(status.seen)
        return max(heard)

    def heard_at(self, member: Member) -> float:
        """When its trainer or its checkpoint server last sent a message; -inf if neither has."""
        peer, status = self._peer(member), self.servers.of_process(member)
        return max((x.seen for x in (peer, status) if x is not None), default=-math.inf)

    def next_check(self, roster: tuple[Member, ...], now: float) -> float | None:
        """When a verdict may change by time alone: soon while a member is in doubt, otherwise later."""
        for member in self.suspects(roster, now):
            peer = self._peer(member)
            ranks = (0, *self.servers.troubled.get(member.replica, ()))
            statuses = [self.servers.of_process(member, rank) for rank in ranks]
            stopped = any(x is not None and x.trainer == "stopped" for x in statuses)
            away = (peer is None or not peer.connected) and now >= self.overload_grace_until
            if away or stopped:
                return now + self.config.lost_s / 2
        soon = now + self.config.silence_s / 4
        return min(soon, self.grace_until) if now < self.grace_until else soon

    def says_running(self, member: Member, now: float) -> bool:
        """Whether the checkpoint server of exactly this process is connected, and reports that it runs."""
        status = self.servers.of_process(member)
        return status is not None and self._status_heard(status, now) and status.trainer == "running"

    def _peer(self, member: Member) -> Peer | None:
        peer = self.peers.get(member.replica)
        if peer is not None and peer.incarnation == member.incarnation:
            return peer
        return self.former.get(member.process)

    def _status_heard(self, status: LastStatus | None, now: float) -> bool:
        return status is not None and status.connected and now - status.seen < self.config.silence_s


def vouches(session: OpenSession, member: Member) -> bool:
    """Whether the process of ``session`` has seen on its own host that ``member``'s process has ended."""
    return member.incarnation in session.predecessors


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
        cuts=session.cuts,
        stores=session.stores,
    )
