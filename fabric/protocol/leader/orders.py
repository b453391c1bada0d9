"""Who is kept out, and why: operators' orders, and the evidence against replicas and hosts that fail.

Both lie in the job's record, so that the next leader knows them. An order is written at once, evidence with
the epoch that answers the failure, by the time of day; a time that lies ahead of a new leader's clock becomes
the time of its election.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fabric.model import HostFailure, HostHistory, Member, OperatorOverrides, Record, counted
from fabric.protocol.leader.base import Backoff, LeaderBase
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules import host_history
from fabric.protocol.rules.assignment import lost_parts, readers_of, waits_for_data

# A record stays small: beyond so many the oldest evidence is forgotten.
MAX_FAILURES = 256
MAX_WHY_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class Penalty:
    """``about`` (``kind``: replica or host) failed ``times`` times and is kept out until ``until``, Unix
    seconds; ``why`` it failed last."""

    kind: str
    about: str
    times: int
    until: float
    why: str

    @property
    def sentence(self) -> str:
        end = f"{datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"{self.kind} {self.about} failed {counted(self.times, 'time')}, last: {self.why}; it is not "
            f"admitted before {end}: mend it, then `fabric admit {self.about}` lets it in at once"
        )


class Admission(LeaderBase):
    """A leader that knows whom to keep out."""

    # When, from what, and what was found: asked for every newcomer, and found once.
    _penalties: tuple[float, tuple[HostFailure, ...], Record | None, list[Penalty]] = (0.0, (), None, [])

    def _recall(self, record: Record) -> None:
        """What earlier leaders wrote, by clocks that may have been others."""
        now = self._now + self._unix
        self.overrides = record.orders
        self.failures = tuple(x if x.at <= now else replace(x, at=now) for x in record.failures)
        self.hosts = host_history.by_this_clock(record.hosts, now)

    # --- orders ------------------------------------------------------------------------------------------

    def on_operator(self, event: io.Operator) -> None:
        if event.action not in ("drain", "evict"):
            self.order(event)
            return
        objection = self.objection(event)
        if objection:
            self._record_event(f"not {event.action}ed", event.replica, objection)
        elif event.action == "drain":
            self.draining[event.replica] = f"drained by {event.who} ({event.why})"
        else:
            self.epoch.not_counted_as_failure.add(event.replica)
            self._schedule_eviction(event.replica, f"evicted by {event.who}: {event.why}")

    def objection(self, asked: io.Operator) -> str:
        """Why what an operator asks for cannot be, in a sentence, or empty."""
        record = self.record
        if record is None:
            return f"job {self.job} has not started: say this when it has its first epoch"
        if record.complete:
            return (
                f"job {self.job} is complete at step {record.base.step}: nobody joins or leaves it any more"
            )
        if asked.action == "retry" and not record.failed:
            return f"job {self.job} has not failed: there is nothing to begin again"
        if asked.action not in ("drain", "evict"):
            return ""
        if record.failed:
            return f"job {self.job} has failed, and has no members until it is started again: {record.failed}"
        objection = self._objection_to_drain if asked.action == "drain" else self._objection_to_evict
        why = objection(record, asked.replica)
        return f"{asked.replica} is not {asked.action}ed: {why}" if why else ""

    def _objection_to_evict(self, record: Record, name: str) -> str:
        if record.member(name) is None:
            return f"it is no member; where a process of it waits outside, `fabric drain {name}` ends that"
        return "" if self._is_spared_by(name) else "nobody else in the roster knows the job's state"

    def _objection_to_drain(self, record: Record, name: str) -> str:
        peer, member = self.liveness.peers.get(name), record.member(name)
        gone = self.epoch.pending_evictions.get(name, "")
        if peer is None or not peer.connected:
            gone = gone or "no process of it is connected"
        else:
            gone = gone or self._suspicion(peer)
        if gone:
            return f"{gone}; say it again when a process of it is connected"
        others = [x for x in record.roster if not x.leaving and x.replica not in (name, *self.draining)]
        if member is not None and not member.leaving and not others:
            return "nobody else would stay, and a job needs a member: to stop it, end its processes"
        shard = self._shard_that_only(name, record, others)
        if shard is not None:
            return (
                f"no other member can read shard {shard}, and the job would wait for one that can: bring"
                f" one back "
                "first, or end the process"
            )
        return ""

    def _shard_that_only(self, name: str, record: Record, others: Sequence[Member]) -> int | None:
        """A shard that the replica ``name`` can read and none of ``others`` can, where the job would wait."""
        if not waits_for_data(record.sharing, others):
            return None
        peer, member = self.liveness.peers.get(name), record.member(name)
        data_slot = (
            member.data_slot if member is not None else peer.session.data_slot if peer is not None else -1
        )
        lost = lost_parts(record.sharing, others)
        return next((part for part in lost if data_slot in readers_of(part, record.sharing)), None)

    def order(self, event: io.Operator) -> None:
        """Pause, resume, scale or admit; saying it again changes nothing."""
        orders, said = self.overrides, f"by {event.who}: {event.why}"
        if event.action == "pause":
            orders = orders if orders.paused else replace(orders, paused=said)
        elif event.action == "resume":
            orders = replace(orders, paused="")
        elif event.action == "scale":
            orders = self._scaled(event, said)
        elif event.action == "admit":
            self._forgive_past(event.replica)
            for key in [k for k in self.readmission_backoff if k[0] == event.replica]:
                del self.readmission_backoff[key]
            self.healing.forget(event.replica)
        self.overrides = orders

    def _forgive_past(self, about: str) -> None:
        """Of a host, or of a replica and so of the hosts that it failed on and is on now."""
        peer = self.liveness.peers.get(about)
        hosts = {about, *(x.host for x in self.failures if x.replica == about)}
        hosts |= {_host(as_member(peer.session))} if peer is not None else set()
        self.failures = tuple(x for x in self.failures if about not in (x.replica, x.host))
        self.hosts = tuple(x for x in self.hosts if x.host not in hosts)

    def _scaled(self, event: io.Operator, said: str) -> OperatorOverrides:
        old = self.overrides
        least = old.min_replicas if event.min_replicas is None else event.min_replicas
        most = old.max_replicas if event.max_replicas is None else event.max_replicas
        if (least, most) == (old.min_replicas, old.max_replicas):
            return old
        return replace(old, min_replicas=least, max_replicas=most, scaled=said if least or most else "")

    def _write_orders(self, record: Record) -> bool:
        """What concerns those to come is written within the epoch: its members need not notice."""
        if not self.has_unwritten_orders:
            return False
        self._write(record)
        return True

    @property
    def has_unwritten_orders(self) -> bool:
        """Whether a leader that followed now would not know them."""
        record = self.record
        return record is None or (self.overrides, self.failures, self.hosts) != (
            record.orders,
            record.failures,
            record.hosts,
        )

    @property
    def least(self) -> int:
        """How many members the job needs to step, from the next epoch on."""
        return self.overrides.min_replicas or self.config.policy.min_replicas

    @property
    def most(self) -> int:
        """How many members there may be."""
        return self.overrides.max_replicas or max(
            self.config.policy.max_replicas, self.overrides.min_replicas
        )

    @property
    def full(self) -> int:
        """With how many members no spare is needed."""
        return min(self.overrides.max_replicas or self.config.policy.start_replicas, self.most)

    def _rescale(self, record: Record) -> bool:
        """Members learn how many are needed from their epoch: a forced one, as it parks or wakes them all."""
        if (len(record.roster) < self.least) == (self._is_decided(record) and self._is_short(record)):
            return False
        said = f"scaled {self.overrides.scaled}" if self.overrides.min_replicas else "as its replicas ask for"
        why = f"the job needs {counted(self.least, 'replica')}: {said}"
        self._write_epoch(record, record.roster, forced=True, why=why)
        return True

    def _drain_surplus(self, record: Record) -> None:
        """More members than there may be: the newest of them leave at a step boundary."""
        if not self.overrides.max_replicas:
            return
        staying = [x for x in record.roster if not x.leaving and x.replica not in self.draining]
        staying.sort(key=lambda x: (x.since, x.data_slot, x.replica))
        for member in staying[self.most :]:
            others = [x for x in staying if x is not member and x.replica not in self.draining]
            if self._shard_that_only(member.replica, record, others) is not None:
                continue
            self.draining[member.replica] = f"no longer wanted: scaled {self.overrides.scaled}"

    # --- evidence ----------------------------------------------------------------------------------------

    def _note_failures(self, record: Record) -> None:
        """Before the epoch without them is written. Once per epoch, however often that write is tried."""
        now = self._now + self._unix
        known = {(x.replica, x.epoch) for x in self.failures}
        found = [
            HostFailure(name, _host(member), record.epoch, round(now, 1), why[:MAX_WHY_CHARACTERS])
            for name, why in sorted(self.epoch.pending_evictions.items())
            if name not in self.epoch.not_counted_as_failure and (member := record.member(name)) is not None
            if (name, record.epoch) not in known
        ]
        recent = [x for x in self.failures if self._age_s(x) < self.config.failures_s]
        self.failures = (*recent, *found)[-MAX_FAILURES:] if self.config.failures else ()
        # What failed together on one host is one failure of it.
        already = {x.host for x in self.failures if x.epoch == record.epoch and x not in found}
        failed = {x.host: x.why for x in found if x.host and x.host not in already}
        if failed and self.config.failures:
            self.hosts = host_history.with_failures(self.hosts, failed, now, self.config.half_life_s)

    def _age_s(self, failure: HostFailure) -> float:
        return self._now + self._unix - failure.at

    def penalties(self) -> list[Penalty]:
        """Of replicas and hosts, as the evidence has them now. A host is to blame only where the job has
        another one."""
        if self._penalties[:3] != (self._now, self.failures, self.record):
            self._penalties = (self._now, self.failures, self.record, self._find_penalties())
        return self._penalties[3]

    def _find_penalties(self) -> list[Penalty]:
        limit, found = self.config.failures, list[Penalty]()
        recent = [x for x in self.failures if self._age_s(x) < self.config.failures_s]
        if not limit or len(recent) < limit:
            return []
        for kind in ("replica", "host"):
            # Replicas of one host that failed in one epoch are one failure of that host.
            by_epoch = {(getattr(x, kind), x.epoch): x for x in recent if getattr(x, kind)}
            counts = Counter(about for about, _ in by_epoch)
            for about, times in sorted(counts.items()):
                if times >= limit and (kind == "replica" or self._has_other_host(about)):
                    own = [x for (name, _), x in by_epoch.items() if name == about]
                    found.append(self._penalty(kind, about, own))
        return found

    def _penalty(self, kind: str, about: str, failures: list[HostFailure]) -> Penalty:
        """It ends when fewer than the limit lie within the window."""
        newest = sorted(failures, key=self._age_s)
        until = newest[self.config.failures - 1].at + self.config.failures_s
        return Penalty(kind, about, len(failures), until, newest[0].why)

    def _has_other_host(self, host: str) -> bool:
        return self.record is not None and any(_host(x) != host for x in self.record.roster)

    def _penalty_of(self, member: Member) -> Penalty | None:
        """Why this replica, or its host, is kept out."""
        found = self.penalties()
        if not found:
            return None
        names = {("replica", member.replica), ("host", _host(member))}
        return max((x for x in found if (x.kind, x.about) in names), key=lambda x: x.until, default=None)

    def knows_of(self, about: str) -> bool:
        """Whether a replica or a host of this name was ever heard of here."""
        members = [as_member(x.session) for x in self.liveness.peers.values()]
        members += self.record.roster if self.record is not None else ()
        accused = {y for x in self.failures for y in (x.replica, x.host)} | {x.host for x in self.hosts}
        return about in accused or any(about in (x.replica, _host(x)) for x in members)

    # --- who may come ------------------------------------------------------------------------------------

    def kept_out(self, peer: Peer) -> str:
        """Why this newcomer is not let in although it could be, in a sentence, or empty."""
        record, name = self.record, peer.session.replica
        if record is None or record.member(name) is not None:
            return ""
        if name in self.draining:
            return self.draining[name]
        if self.overrides.paused:
            return f"nobody is admitted: paused {self.overrides.paused}; `fabric resume` ends that"
        penalty = self._penalty_of(as_member(peer.session))
        # A penalty that would keep the whole job standing is none.
        if penalty is not None and len(record.roster) >= self.least:
            return penalty.sentence
        return self._cut_off(record, peer) or self._surplus(record, peer)

    def _surplus(self, record: Record, peer: Peer) -> str:
        """Why the job does not need this newcomer now, in a sentence, or empty."""
        enough = self.full if self.stands_by(peer) else self.most
        if len(record.roster) < enough:
            return ""
        why = (
            f"the job has its {counted(enough, 'member')}: this one stands by, to take the place of one "
            "that dies"
        )
        suspect = self.suspect_host(peer) if not peer.session.spare else None
        if suspect is not None and len(record.roster) < self.most:
            why += (
                f"; its host {suspect.host} failed {counted(suspect.times, 'time')} in the last days, last: "
                f"{suspect.why}; `fabric admit {suspect.host}` lets it in at once"
            )
        return why

    def suspect_host(self, peer: Peer) -> HostHistory | None:
        """Its host, where that has failed so often in the last days that it is likely to fail again."""
        host, now = _host(as_member(peer.session)), self._now + self._unix
        if not self.config.failures or not self.hosts or not self._has_other_host(host):
            return None
        found = (x for x in self.hosts if x.host == host)
        return next((x for x in found if self.host_score(x, now) >= host_history.SUSPECT), None)

    def hosts_that_failed(self) -> list[dict[str, Any]]:
        """For people, the most suspect first: what is remembered, what it comes to now, and who is there."""
        now = self._now + self._unix
        there = defaultdict[str, set[str]](set)
        for member in (*(self.record.roster if self.record else ()), *map(as_member, self._sessions())):
            there[_host(member)].add(member.replica)
        found = [
            {**asdict(x), "score": round(value, 3), "replicas": sorted(there.get(x.host, ()))}
            | {"suspect": value >= host_history.SUSPECT and self._has_other_host(x.host)}
            for x in self.hosts
            if (value := self.host_score(x, now)) >= host_history.FORGOTTEN
        ]
        return sorted(found, key=lambda x: (-x["score"], x["host"]))

    def _sessions(self) -> list[m.OpenSession]:
        return [x.session for x in self.liveness.peers.values() if x.connected]

    def host_score(self, host: HostHistory, unix_s: float) -> float:
        """What its failures come to at that time."""
        return host_history.score(host, unix_s, self.config.half_life_s)

    def stands_by(self, peer: Peer) -> bool:
        """Whether it takes part only while members are missing: it asked to, or its host is suspect."""
        return peer.session.spare or self.suspect_host(peer) is not None

    def _cut_off(self, record: Record, peer: Peer) -> str:
        """Why this newcomer would only be left out again for its links, in a sentence, or empty. A job that
        is short of members does not wait for links to prove themselves."""
        missing = self._out_of_reach(record, peer)
        if missing:
            names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            return f"it cannot reach {names}: it is let in when it reaches every member"
        process = peer.session.replica, peer.incarnation
        if self._is_parked(record) or self.healing.is_calm(process, self._now):
            return ""
        return (
            "its links to members were cut, and are whole again: it is let in when they have held for "
            f"{self.healing.calm_s(process):g} s"
        )

    @staticmethod
    def _out_of_reach(record: Record, peer: Peer) -> list[str]:
        """Members that this newcomer says it cannot reach."""
        said = peer.beat.unreachable if peer.beat is not None else ()
        return [name for name in said if record.member(name) is not None]

    def _is_penalised(self, record: Record, peer: Peer) -> bool:
        return len(record.roster) >= self.least and self._penalty_of(as_member(peer.session)) is not None

    def _notify_kept_out(self, record: Record) -> None:
        """Who waits outside is told why, once for every reason."""
        peers = self.liveness.peers
        for name in sorted(record.strangers(peers.keys()) | (self.waiting_outside.keys() & peers.keys())):
            peer = peers[name]
            why = self.kept_out(peer) if peer.connected and name not in self.draining else ""
            # The session of a process that has ended may stand for a while: that one does not wait.
            why = "" if why and self._suspicion(peer) else why
            if why == self.waiting_outside.get(name, ""):
                continue
            self.waiting_outside.pop(name, None)
            if why:
                self.waiting_outside[name] = why
                self._record_event("kept out", name, why)
                self._send(name, m.Rejected(why, retry=True))

    def _is_backing_off(self, peer: Peer) -> bool:
        """Whether it was evicted not long ago, or is still where it was evicted for being."""
        process = peer.session.replica, peer.incarnation
        return (
            self._now < self.readmission_backoff.get(process, Backoff()).until
            or process in self.evicted_in_user_code
        )

    def _note_return(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Whoever waits, or went on, has come back from the user's code; and whose links are still cut."""
        process = peer.session.replica, peer.incarnation
        if self.record is not None and beat.unreachable and self._out_of_reach(self.record, peer):
            self.healing.missed(process, self._now)
        if beat.waits or beat.step > self.evicted_in_user_code.get(process, beat.step):
            self.evicted_in_user_code.pop(process, None)


def _host(member: Member) -> str:
    """Where all of its ranks are reached, or empty."""
    hosts = {x.link.rpartition(":")[0] for x in member.addresses}
    return hosts.pop() if len(hosts) == 1 else ""
