"""The evidence against replicas, hosts and micro-batches: recent failures, and deaths.

The record holds the failures, so that the next leader knows them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from fabric.model import Death, HostFailure, HostHistory, Member, Poison, Record, Value, counted, shortened
from fabric.protocol.leader.liveness import LastStatus, Peer, as_member
from fabric.protocol.leader.state import JobState, Mark
from fabric.protocol.rules import poison

# The failures of hosts, remembered for days. Pure.
#
# Hosts that failed fail again: in a public trace 14 % of the repaired nodes fail again within half an hour,
# 37 % within a day and 52 % within a week. So a failure counts half as much for every day that has passed.
# A host is suspect while its failures sum to ``SUSPECT``.


# Two failures within a day, or three within two days, give a host this score.
SUSPECT = 1.5
# A host with a lower score is forgotten: one failure has this score after a week.
FORGOTTEN = 2.0**-7
# The most hosts in a record, to keep it small: the least suspect ones beyond it are forgotten.
MAX_HOSTS = 256


def score(history: HostHistory, unix_s: float, half_life_s: float) -> float:
    """The score of this host's failures at ``unix_s``."""
    return float(history.score * 0.5 ** (max(0.0, unix_s - history.at) / half_life_s))


def with_failures(
    hosts: Iterable[HostHistory], failed: Mapping[str, str], unix_s: float, half_life_s: float
) -> tuple[HostHistory, ...]:
    """Add one failure of each host in ``failed`` (host -> why) to ``hosts``; sort them by host."""
    by_host = {x.host: x for x in hosts if score(x, unix_s, half_life_s) >= FORGOTTEN}
    for host, why in failed.items():
        old = by_host.get(host, HostHistory(host, 0, 0.0, unix_s))
        value = score(old, unix_s, half_life_s) + 1.0
        by_host[host] = HostHistory(host, old.times + 1, round(value, 4), round(unix_s, 1), why)
    worst = sorted(by_host.values(), key=lambda x: -score(x, unix_s, half_life_s))[:MAX_HOSTS]
    return tuple(sorted(worst, key=lambda x: x.host))


# The most failures in a record, which keep the record small: the oldest failures are dropped.
MAX_FAILURES = 256
MAX_WHY_CHARACTERS = 120


class Penalty(Value):
    """A replica or host that failed too often, and is kept out."""

    kind: str  # whether a replica or a host is kept out
    about: str
    times: int
    until: float  # the time when the replica or host may return, Unix seconds
    why: str  # the reason of the last failure of the replica or host

    @property
    def sentence(self) -> str:
        end = f"{datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"{self.kind} {self.about} failed {counted(self.times, 'time')}, last: {self.why}; it is not "
            f"admitted before {end}: mend it, then `fabric admit {self.about}` lets it in at once"
        )


class FailureEvidence(Struct, eq=False):
    """Rule 7: counts failures by replica and host, and keeps out a replica or host that failed too often."""

    state: JobState
    failures: tuple[HostFailure, ...] = ()
    hosts: tuple[HostHistory, ...] = ()
    forgiven_deaths: set[tuple[str, Death]] = field(default_factory=set)
    # A cache of the time, the arguments and the result, because every newcomer asks the same question.
    _penalties: tuple[float, tuple[HostFailure, ...], Record | None, list[Penalty]] = (0.0, (), None, [])

    def recall(self, record: Record) -> None:
        """Take over the evidence of earlier leaders, and correct times from clocks ahead of this one."""
        now = self.state.unix_now
        self.failures = tuple(x if x.at <= now else replace(x, at=now) for x in record.failures)
        self.hosts = tuple(x if x.at <= now else replace(x, at=now) for x in record.hosts)

    def note_failures(self, record: Record) -> None:
        """Note the pending evictions as failures, until the store has lost their write (``take_back``)."""
        now = self.state.unix_now
        new = [
            HostFailure(
                name,
                host_of(member) or self._failed_host(member),
                record.epoch,
                round(now, 1),
                shortened(why, MAX_WHY_CHARACTERS),
            )
            for name, why in sorted(self.state.epoch.pending_evictions.items())
            if not self.state.epoch.has(name, Mark.EXCUSED) and (member := record.member(name))
        ]
        self._add(*new)
        # Members on one host that fail in the same epoch count as one failure of that host.
        failed = {x.host: x.why for x in new if x.host}
        if failed and self.state.config.failures:
            self.hosts = with_failures(self.hosts, failed, now, self.state.config.half_life_s)

    def _failed_host(self, member: Member) -> str:
        """Of a replica on several hosts: the one that failed first, else the only one away, or empty."""
        statuses: dict[str, list[LastStatus | None]] = {}
        for rank, address in enumerate(member.addresses):
            status = self.state.liveness.servers.of_process(member, rank)
            statuses.setdefault(address.host, []).append(status)
        failed = [
            (x.since, host)
            for host, of_host in statuses.items()
            for x in of_host
            if x is not None and x.connected and x.trainer in ("gone", "stopped")
        ]
        if failed:
            return min(failed)[1]
        away = [host for host, of_host in statuses.items() if not any(x and x.connected for x in of_host)]
        return away[0] if len(away) == 1 else ""

    def take_back(self, record: Record) -> None:
        """Forget the failures of evictions that the store did not take: ``record`` lists the members."""
        lost = {x.host for x in self.failures if x.epoch == record.epoch}
        self.failures = tuple(x for x in self.failures if x.epoch != record.epoch)
        before = {x.host: x for x in record.hosts}
        hosts = (before.get(x.host) if x.host in lost else x for x in self.hosts)
        self.hosts = tuple(x for x in hosts if x is not None)

    def note_launch(self, replica: str, host: str, why: str) -> None:
        """Note a process that ended before it had a session: a failure without an epoch."""
        self._add(HostFailure(replica, host, 0, self.state.unix_now, shortened(why, MAX_WHY_CHARACTERS)))

    def _add(self, *new: HostFailure) -> None:
        self.failures = (*self.recent, *new)[-MAX_FAILURES:] if self.state.config.failures else ()

    @property
    def recent(self) -> list[HostFailure]:
        """The failures that count for a penalty now."""
        since = self.state.unix_now - self.state.config.failures_s
        return [x for x in self.failures if x.at > since]

    def penalties(self) -> list[Penalty]:
        """The present penalties of replicas and hosts. A host gets one only if the job has another host."""
        if self._penalties[:3] != (self.state.now, self.failures, self.state.record):
            self._penalties = (self.state.now, self.failures, self.state.record, self.find_penalties())
        return self._penalties[3]

    def find_penalties(self) -> list[Penalty]:
        limit, penalties = self.state.config.failures, list[Penalty]()
        recent = self.recent
        if not limit or len(recent) < limit:
            return []
        starts, numbered = Counter[str](), list[tuple[HostFailure, int]]()
        for x in recent:
            starts[x.replica] += not x.epoch
            numbered.append((x, x.epoch or -starts[x.replica]))
        for kind in ("replica", "host"):
            # Replicas on one host that fail in the same epoch count as one failure of that host, and so do
            # their first starts that fail, their second ones, and so on.
            by_epoch = {(getattr(x, kind), number): x for x, number in numbered if getattr(x, kind)}
            counts = Counter(about for about, _ in by_epoch)
            for about, times in sorted(counts.items()):
                if times >= limit and (kind == "replica" or self._has_other_host(about)):
                    own = [x for (name, _), x in by_epoch.items() if name == about]
                    own.sort(key=lambda x: -x.at)
                    # It ends when fewer failures than the limit lie within the window.
                    until = own[limit - 1].at + self.state.config.failures_s
                    penalties.append(Penalty(kind, about, times, until, own[0].why))
        return penalties

    def _has_other_host(self, host: str) -> bool:
        return self.state.record is not None and any(host_of(x) != host for x in self.state.record.roster)

    def penalty_of(self, member: Member) -> Penalty | None:
        """The penalty that keeps this member's replica or host out; None: there is no such penalty."""
        penalties = self.penalties()
        if not penalties:
            return None
        names = {("replica", member.replica), ("host", host_of(member))}
        return max((x for x in penalties if (x.kind, x.about) in names), key=lambda x: x.until, default=None)

    def knows_of(self, about: str) -> bool:
        """Whether this leader has ever heard of a replica or a host of this name."""
        members = [as_member(x.session) for x in self.state.liveness.peers.values()]
        members += self.state.record.roster if self.state.record is not None else ()
        accused = {y for x in self.failures for y in (x.replica, x.host)} | {x.host for x in self.hosts}
        return about in accused or any(about in (x.replica, host_of(x)) for x in members)

    def forgive_past(self, about: str) -> None:
        """Forget the failures of a host, or of a replica and of the hosts where it failed and is now."""
        peer = self.state.liveness.peers.get(about)
        hosts = {about, *(x.host for x in self.failures if x.replica == about)}
        hosts |= {host_of(as_member(peer.session))} if peer is not None else set()
        self.failures = tuple(x for x in self.failures if about not in (x.replica, x.host))
        self.hosts = tuple(x for x in self.hosts if x.host not in hosts)

    def suspect_host(self, peer: Peer) -> HostHistory | None:
        """The history of this peer's host, if it has failed so often that it is likely to fail again."""
        host, now = host_of(as_member(peer.session)), self.state.unix_now
        if not self.state.config.failures or not self.hosts or not self._has_other_host(host):
            return None
        histories = (x for x in self.hosts if x.host == host)
        return next((x for x in histories if score(x, now, self.state.config.half_life_s) >= SUSPECT), None)

    def suspect_hosts(self) -> set[str]:
        """The hosts that failed so often that another one is taken first."""
        now = self.state.unix_now
        suspects = {x.host for x in self.hosts if score(x, now, self.state.config.half_life_s) >= SUSPECT}
        return suspects.union(x.about for x in self.penalties() if x.kind == "host")

    def hosts_that_failed(self) -> list[dict[str, Any]]:
        """For people: each host's history, present score and replicas, the most suspect host first."""
        now = self.state.unix_now
        there = defaultdict[str, set[str]](set)
        for member in (
            *(self.state.record.roster if self.state.record else ()),
            *(as_member(x.session) for x in self.state.liveness.peers.values() if x.connected),
        ):
            there[host_of(member)].add(member.replica)
        failed = {x.host: sorted({y.replica for y in self.failures if y.host == x.host}) for x in self.hosts}
        rows = [
            {**asdict(x), "score": round(value, 3), "replicas": sorted(there.get(x.host, ()))}
            | {"failed": failed[x.host]}
            | {"suspect": value >= SUSPECT and self._has_other_host(x.host)}
            for x in self.hosts
            if (value := score(x, now, self.state.config.half_life_s)) >= FORGOTTEN
        ]
        return sorted(rows, key=lambda x: (-x["score"], x["host"]))

    def stands_by(self, peer: Peer) -> bool:
        """Whether this peer joins only while members are missing: it is a spare, or its host is suspect."""
        return peer.session.spare or self.suspect_host(peer) is not None

    def known_poison(self, record: Record) -> tuple[Poison, ...]:
        """The poison for the next forced record: the poison in ``record``, and the poison proven since."""
        if record.sharing.on_poison != "skip":
            return ()
        return poison.merged(record.poison, poison.proven(self.state.deaths(), self.forgiven_deaths))

    def forgive_deaths(self) -> None:
        """Forget earlier deaths, because an operator has looked at the job and starts it again."""
        self.forgiven_deaths = {
            (replica, death) for replica, deaths in self.state.deaths() for death in deaths
        }


def host_of(member: Member) -> str:
    """The host of all ranks of this member; empty if they are on several hosts."""
    hosts = {x.host for x in member.addresses}
    return hosts.pop() if len(hosts) == 1 else ""
