"""Drains, limits and notices of members, and objections to an operator's order."""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Member, Record, Value, counted, first_of
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState, LeaderOutbox, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.assignment import lost_parts, readers_of, waits_for_data

# An order takes a host for gone only if nothing was heard of it for this many seconds.
GONE_AFTER_S = 5.0
# Why a replica that has notice is drained, and why it may end.
NOTICED = "its host gave notice that it will be killed soon"
UNUSED = "had notice before it took part: the job goes on without this process"
UNSAVED = "had notice, as has every replica, and none of them has FABRIC_DURABLE: no state is written"

# The members at which the leader looks in a second to answer processes with notice.
ROWS_PER_S = 4000


class NoticedRoster(Value):
    """The notices of a roster's members at one time."""

    record: Record | None = None
    at: float = -math.inf
    is_whole: bool = False  # whether each member that stays has notice; if not, the rest is not known
    goes_on: bool = False  # whether a member that stays has said that it has no notice
    saved: int = -1  # the step of the saved state; negative: no state is saved yet
    saver: str = ""  # the living member that saves the state; empty: none of them has storage
    is_over: bool = False  # whether no other process needs the saver any more


class OperatorOrders(Struct, eq=False):
    """Drains members and scales the job."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    writer: RecordWriter
    draining: dict[str, str] = field(default_factory=dict)  # replica -> who drains it, and why
    noticed: NoticedRoster = NoticedRoster()  # a cache, because every member with notice asks

    def ask_to_drain(self, replica: str, why: str) -> None:
        self.draining[replica] = why

    def forget(self, replica: str) -> None:
        self.draining.pop(replica, None)

    def rescale(self, record: Record) -> bool:
        """Write a forced epoch with the new minimum of members, if that minimum parks or wakes them."""
        is_parked = self.state.is_decided(record) and self.state.is_short(record)
        if (len(record.roster) < self.limits.least) == is_parked:
            return False
        orders = self.limits.overrides
        source = f"scaled {orders.scaled}" if orders.min_replicas else "as its replicas ask for"
        why = f"the job needs {counted(self.limits.least, 'replica')}: {source}"
        self.writer.write_epoch(record, record.roster, forced=True, why=why)
        return True

    def _drain_surplus(self, record: Record) -> None:
        """Drain the newest members above the maximum."""
        if not self.limits.overrides.max_replicas:
            return
        staying = [x for x in record.roster if not x.leaving and x.replica not in self.draining]
        staying.sort(key=lambda x: (x.since, x.data_slot, x.replica))
        for member in staying[self.limits.most :]:
            others = [x for x in staying if x is not member and x.replica not in self.draining]
            if self._shard_that_only(member.replica, record, others) is not None:
                continue
            self.draining[member.replica] = f"no longer wanted: scaled {self.limits.overrides.scaled}"

    def _beats(self, roster: Iterable[Member]) -> dict[str, m.Heartbeat]:
        """The newest heartbeats of these processes, by replica."""
        peers = self.state.liveness.peers
        return {
            x.replica: peer.beat
            for x in roster
            if (peer := peers.get(x.replica)) and peer.process == x.process and peer.beat
        }

    def heed(self, peer: Peer, ack: m.HeartbeatAck) -> m.HeartbeatAck:
        """Rule 15: answer a process that has notice.

        While a member without notice stays, members with notice are drained. Else one member saves the state,
        and all may end when it is saved, also those not listed now. The saver ends last: no step follows.
        """
        record, beat = self.state.record, peer.beat
        if record is None or beat is None or not beat.noticed:
            return ack
        notices = self._look(record)
        if notices.saved >= 0:
            why = f"had notice, as has every replica, and the state of step {notices.saved} is saved"
            return replace(ack, leave=why) if not beat.saved or notices.is_over else ack
        if not self.state.in_force(peer):
            return replace(ack, leave=UNUSED) if beat.is_outside else ack
        if not notices.is_whole:
            return replace(ack, goes_on=notices.goes_on)
        saves = notices.saver == peer.session.replica
        return replace(ack, save=saves, leave="" if notices.saver else UNSAVED)

    def _look(self, record: Record) -> NoticedRoster:
        """Look at all members, in a large job not for each heartbeat: a thousand may have notice at once."""
        now, last = self.state.now, self.noticed
        if last.record is record and now - last.at < len(record.roster) / ROWS_PER_S:
            return last
        beats, peers = self._beats(record.roster), self.state.liveness.peers
        staying = [beats.get(x.replica) for x in record.roster if not x.leaving]
        if not all(beat and beat.noticed for beat in staying):
            goes_on = any(beat and not beat.noticed for beat in staying)
            self.noticed = NoticedRoster(record, now, goes_on=goes_on)
            return self.noticed
        saved = next((x.step for name, x in beats.items() if x.saved and peers[name].connected), -1)
        saves = {name for name, beat in beats.items() if beat.saves}
        # One member writes: while one that saves, or was told to, lives, no other is told.
        able = [
            (x.replica not in saves, x.replica != last.saver, x.leaving, x.since, x.replica)
            for x in record.roster
            if x.stores and not x.joining and not self.state.liveness.failure_reason(x, now)
        ]
        saver = min(able)[-1] if able else ""
        there = [peer.beat for peer in peers.values() if peer.connected and peer.beat]
        # A member that a new leader does not see yet may live, and would save the state again.
        unseen = (x for x in record.roster if x.replica not in beats)
        is_over = all(x.saved for x in there if x.noticed) and all(
            self.state.liveness.failure_reason(x, now) for x in unseen
        )
        self.noticed = NoticedRoster(record, now, True, saved=saved, saver=saver, is_over=is_over)
        return self.noticed

    def _drain_noticed(self, record: Record) -> None:
        """Rule 15: drain members with notice while a member without notice stays."""
        beats = self._beats(x for x in record.roster if not x.leaving)
        noticed = {name for name, beat in beats.items() if beat.noticed}
        staying = [x for x in record.roster if not x.leaving and x.replica not in noticed]
        for name in sorted(noticed.difference(self.draining)) if staying else ():
            if self._shard_that_only(name, record, staying) is None:
                self.draining[name] = NOTICED

    def drain(self, record: Record) -> bool:
        if self._look(record).saver:
            return False  # no step follows after which a member could leave
        self._drain_surplus(record)
        self._drain_noticed(record)
        names = [x for x in record.roster if x.replica in self.draining] if self.draining else []
        leaving = [x for x in record.roster if x.leaving]
        for name, why in self.draining.items():
            # Replicas outside the roster need not come back; one with notice ends by its heartbeat's answer.
            if record.member(name) is None and why != NOTICED:
                self.outbox.send(name, m.Rejected(f"{name} is {why}: start it again when it is wanted"))
        left = tuple(x for x in record.roster if not x.leaving)
        returning = {x.process for x in names if x.returns}
        if leaving and not returning and any(self.state.knows(x) for x in left):
            self.writer.write_epoch(record, left, False, f"{', '.join(x.replica for x in leaving)} leaves")
            return True
        if not names or all(x.replica in self.draining for x in record.roster):
            return False
        roster = tuple(replace(x, leaving=True, returns="") if x in names else x for x in record.roster)
        whys = "; ".join(sorted({self.draining[x.replica] for x in names}))
        # A drain takes away the order to come back in another layout.
        layouts = tuple(x for x in record.adaptation.layouts if x.process not in returning)
        adaptation = replace(record.adaptation, layouts=layouts)
        why = f"{', '.join(x.replica for x in names)} is being drained: {whys}"
        self.writer.write_epoch(record, roster, False, why, adaptation=adaptation)
        return True

    def _objection_to_drain(self, record: Record, name: str) -> str:
        peer, member = self.state.liveness.peers.get(name), record.member(name)
        gone = self.state.epoch.pending_evictions.get(name, "")
        if peer is None or not peer.connected:
            gone = gone or "no process of it is connected"
        else:
            gone = gone or self.state.suspicion(peer)
        if gone:
            return f"{gone}; give the command again when a process of it is connected"
        others = [x for x in record.roster if not x.leaving and x.replica not in (name, *self.draining)]
        if member is not None and not member.leaving and not others:
            return "no other member would stay, and a job needs one: to stop the job, end its processes"
        shard = self._shard_that_only(name, record, others)
        if shard is not None:
            return (
                f"no other member can read shard {shard}, and the job would wait for one that can: bring one "
                "back first, or end the process"
            )
        return ""

    def _objection_to_gone(self, record: Record, name: str) -> str:
        """Why the host of this member is not taken for gone."""
        member, liveness = record.member(name), self.state.liveness
        if member is None:
            return "it is no member"
        peer, status = liveness.peers.get(name), liveness.servers.of_process(member)
        speaks = peer is not None and peer.connected and peer.process == member.process
        if speaks or (status is not None and status.connected):
            return "its host is there: a process of it is connected"
        silent_s = self.state.now - liveness.last_contact(member, self.state.now)
        if silent_s < GONE_AFTER_S:
            return f"its host was heard {silent_s:.1f} s ago; give the command again in {GONE_AFTER_S:g} s"
        return ""

    def _objection_to_end(self, record: Record) -> str:
        """Why the job cannot be ended now: a process of it lives, or may live where no lighthouse sees it."""
        liveness, now, limit_s = self.state.liveness, self.state.now, self.state.out_of_sight_s
        living = [x for x, p in sorted(liveness.peers.items()) if p.connected and not self.state.suspicion(p)]
        if not record.failed:
            living += [
                x.replica
                for x in record.roster
                if x.replica not in living
                and not liveness.proven_dead(x)
                and now - liveness.last_contact(x, now) < limit_s
            ]
        if not living:
            return ""
        return (
            f"job {self.state.job} is not ended: {first_of(living, 8)} may still train; end their "
            f"processes, and give the command again when they have been away for {limit_s:g} s"
        )

    def _shard_that_only(self, name: str, record: Record, others: Sequence[Member]) -> int | None:
        """A shard that only the replica ``name`` can read and none of ``others``, if the job would wait."""
        if not waits_for_data(record.sharing, others):
            return None
        peer, member = self.state.liveness.peers.get(name), record.member(name)
        replica = member or (peer.session if peer is not None else None)
        data_slot = replica.data_slot if replica is not None else -1
        if data_slot < 0:  # the leader chose its data slot when it was a member
            data_slot = self.writer.data_slots.get(name, -1)
        lost = lost_parts(record.sharing, others)
        return next((part for part in lost if data_slot in readers_of(part, record.sharing)), None)

    def objection(self, asked: io.Operator) -> str:
        """Why this order cannot be followed, in a sentence, or empty."""
        record = self.state.record
        if record is None:
            return f"job {self.state.job} has not started: say this when it has its first epoch"
        if record.complete:
            step = record.base.step
            return f"job {self.state.job} is complete at step {step}: no replica joins or leaves it any more"
        if asked.action == "retry" and not record.failed:
            return f"job {self.state.job} has not failed: there is nothing to begin again"
        if asked.action == "end":
            return self._objection_to_end(record)
        if asked.action not in ("drain", "evict"):
            return ""
        if record.failed:
            failed = f"job {self.state.job} has failed, and has no members until it is started again"
            return f"{failed}: {record.failed}"
        if asked.host_is_gone:
            why = self._objection_to_gone(record, asked.replica)
            return f"{asked.replica} is not evicted: {why}" if why else ""
        if asked.action == "drain":
            why = self._objection_to_drain(record, asked.replica)
        elif record.member(asked.replica) is None:
            order = f"`fabric drain {asked.replica}`"
            why = f"it is no member; where a process of it waits outside, {order} ends that"
        else:
            why = "" if self.state.is_spared_by(asked.replica) else "no other member knows the job's state"
        return f"{asked.replica} is not {asked.action}ed: {why}" if why else ""
