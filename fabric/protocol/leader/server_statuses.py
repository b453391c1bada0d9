"""The last status of every checkpoint server, and the states that the servers hold.

A replica may have several processes at a time: the scheduler may start a second one on another host while the
first one is only out of contact. So a replica may have several servers of one rank; one of them counts.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from fabric.model import Death, Member, ReplicaProcess, SnapshotRef
from fabric.protocol.messages.network import TrainerStatus
from fabric.protocol.messages.rank_messages import rank_of_url

# A stopped trainer counts as running again after it has run for this many seconds without another stop.
STOP_CALM_S = 10.0
# The most replicas outside the roster, without a connection, whose last words are kept.
MOST_GONE = 256


@dataclass(slots=True)
class LastStatus:
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


@dataclass(slots=True)
class ServerStatuses:
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
