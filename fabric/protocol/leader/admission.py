"""The sessions that may stand and the newcomers that may join, and why the others may not."""

import math

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Record, ReplicaProcess, Value, counted, first_of
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.liveness import Liveness, Peer, as_member, vouches
from fabric.protocol.leader.orders import OperatorOrders
from fabric.protocol.leader.state import JobState, LeaderOutbox, Mark, RosterLimits, Standing, standing
from fabric.protocol.messages import network as m
from fabric.protocol.rules.compatibility import incompatibility
from fabric.protocol.rules.link_graph import Healing

# Seconds that an evicted process waits before its readmission, doubled with every eviction.
READMIT_S = 0.25
READMIT_LIMIT_S = 30.0
# After a failed blocking join the newcomer waits this many times as long as the members waited for it.
READMIT_STALLS = 4.0
# A session that is silent for this many seconds counts as left open by a dead process.
HALF_OPEN_S = 10.0


class Backoff(Value):
    """The wait of an evicted process."""

    times: int = 0  # number of evictions of the process
    until: float = 0.0
    late: bool = False  # in its blocking join the others waited too long for its state


class Admission(Struct, eq=False):
    """Rule 4: keeps newcomers out for an operator's order, failures, missing links or a backoff."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    evidence: FailureEvidence
    orders: OperatorOrders
    endings: Endings
    readmission_backoff: dict[ReplicaProcess, Backoff] = field(default_factory=dict)
    healing: Healing = field(default_factory=Healing)
    evicted_in_user_code: dict[ReplicaProcess, int] = field(default_factory=dict)  # process -> its step then
    # Replica -> its process that a planned epoch has left out. It ends, however long its session stays open.
    ending: dict[str, ReplicaProcess] = field(default_factory=dict)
    waiting_outside: dict[str, str] = field(default_factory=dict)  # newcomer -> the reason last sent to it
    # The replicas whose processes opened a session without being a member, by how much they count.
    below: dict[Standing, set[str]] = field(
        default_factory=lambda: {Standing.STRANGER: set(), Standing.RETURNING: set()}
    )

    def kept_out(self, peer: Peer) -> str:
        """Why this newcomer is kept out, in a sentence, or empty."""
        record, name = self.state.record, peer.session.replica
        if record is None or record.member(name) is not None:
            return ""
        if name in self.orders.draining:
            return self.orders.draining[name]
        if self.limits.overrides.paused:
            return f"joins are paused {self.limits.overrides.paused}; `fabric resume` ends that"
        penalty = self.evidence.penalty_of(as_member(peer.session))
        # While members are missing, a penalty keeps no replica out.
        if penalty is not None and len(record.roster) >= self.limits.least:
            return penalty.sentence
        return self._cut_off(record, peer) or self._surplus(record, peer)

    def _surplus(self, record: Record, peer: Peer) -> str:
        """Why the job does not need this newcomer now, in a sentence, or empty."""
        enough = self.limits.full if self.evidence.stands_by(peer) else self.limits.most
        if len(record.roster) < enough:
            return ""
        why = (
            f"the job has its {counted(enough, 'member')}: this one stands by, to take the place of one "
            "that dies"
        )
        suspect = self.evidence.suspect_host(peer) if not peer.session.spare else None
        if suspect is not None and len(record.roster) < self.limits.most:
            why += (
                f"; its host {suspect.host} failed {counted(suspect.times, 'time')} in the last days, last: "
                f"{suspect.why}; `fabric admit {suspect.host}` lets it in at once"
            )
        return why

    def _cut_off(self, record: Record, peer: Peer) -> str:
        """Why this newcomer's links are not good enough, in a sentence, or empty.

        A job that is short of members does not wait until the links have held for some time.
        """
        missing = self.out_of_reach(record, peer)
        if missing:
            names = first_of(missing)
            lost_bytes = peer.beat.lost_bytes if peer.beat is not None else 0
            if lost_bytes > 0:
                return (
                    f"small messages pass between it and {names}, and messages of {lost_bytes} bytes are "
                    "lost: give their networks the same MTU; it is let in when large messages pass"
                )
            return f"it cannot reach {names}: it is let in when it reaches every member"
        process = peer.process
        if self.state.is_parked(record) or self.healing.is_calm(process, self.state.now):
            return ""
        return (
            "its links to members were cut, and are whole again: it is let in when they have held for "
            f"{self.healing.calm_s(process):g} s"
        )

    @staticmethod
    def out_of_reach(record: Record, peer: Peer) -> list[str]:
        """Members that this newcomer says it cannot reach."""
        unreachable = peer.beat.unreachable if peer.beat is not None else ()
        return [name for name in unreachable if record.member(name) is not None]

    def is_penalised(self, record: Record, peer: Peer) -> bool:
        """Whether this newcomer's failures keep it out. They do not while the job is short of members."""
        return (
            len(record.roster) >= self.limits.least
            and self.evidence.penalty_of(as_member(peer.session)) is not None
        )

    def notify_kept_out(self, record: Record) -> None:
        """Tell each newcomer outside why it waits, once for every reason."""
        peers = self.state.liveness.peers
        for name in sorted(record.strangers(peers.keys()) | (self.waiting_outside.keys() & peers.keys())):
            peer = peers[name]
            why = self.kept_out(peer) if peer.connected and name not in self.orders.draining else ""
            # The session of an ended process may stay open for a while, and an ended process does not wait.
            # The last reason stays, because the process may only be silent for a moment.
            if why and self.state.suspicion(peer):
                continue
            if why == self.waiting_outside.get(name, ""):
                continue
            self.waiting_outside.pop(name, None)
            if why:
                self.waiting_outside[name] = why
                self.outbox.record_event("kept out", name, why)
                self.outbox.send(name, m.Rejected(why, retry=True))

    def take_late(self, process: ReplicaProcess) -> bool:
        """Whether the others waited too long for this process. This is True once for each such join."""
        backoff = self.readmission_backoff.get(process, Backoff())
        if backoff.late:
            self.readmission_backoff[process] = replace(backoff, late=False)
        return backoff.late

    def note_return(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Note by a heartbeat from outside that the user code is over, or that links are still cut."""
        if self.state.record is not None and beat.unreachable and self.out_of_reach(self.state.record, peer):
            self.healing.missed(peer.process, self.state.now)
        evicted = self.evicted_in_user_code
        if evicted and (beat.waits or beat.step > evicted.get(peer.process, beat.step)):
            evicted.pop(peer.process, None)

    def back_off(self, record: Record) -> None:
        """Let evicted processes wait, longer every time, because each eviction stops the other members."""
        # A cold start lists each process that has a session, so such a process does not end after all.
        self.ending = {name: x for name, x in self.ending.items() if not record.lists(*x)}
        for member in self.state.record.roster if self.state.record is not None else ():
            if record.lists(member.replica, member.incarnation):
                continue
            if member.leaving:
                if not record.is_forced:
                    self.ending[member.replica] = member.process
                continue
            self.outbox.note_loss(member.replica, record.incident_id)
            process = member.process
            if self.state.epoch.has(member.replica, Mark.CUT_OFF):
                self.healing.left_out(process, self.state.now)
                continue
            times = self.readmission_backoff.get(process, Backoff()).times + 1
            wait_s = min(READMIT_S * 2 ** (times - 1), READMIT_LIMIT_S)
            if late := self.state.epoch.has(member.replica, Mark.SLOW):
                wait_s = max(wait_s, READMIT_STALLS * self.state.join_stall_s(member.replica))
            self.readmission_backoff[process] = Backoff(times, self.state.now + wait_s, late)

    def forget(self, replica: str) -> None:
        self.waiting_outside.pop(replica, None)

    def keep_out_of_rounds(self, peer: Peer) -> None:
        self.evicted_in_user_code[peer.process] = peer.step

    def refuse_unlike(self, session: m.OpenSession) -> None:
        """Refuse each process that spoke before this one, counts less, and has other settings."""
        record, peers = self.state.record, self.state.liveness.peers
        own = standing(session.process, record)
        for name in [x for how in Standing if how < own for x in self.below.get(how, ())]:
            peer = peers.get(name)
            if peer is None or not peer.connected or standing(peer.process, record) >= own:
                self._forget_below(name)
                continue
            why = _difference(peer.session, session)
            if why or (own is Standing.LISTED and peer.session.data_slot < 0):
                # All members have equal settings, so one comparison is enough. Data slots all differ.
                self._forget_below(name)
            if why:
                self.outbox.record_event("session refused", name, why)
                self.outbox.send(name, m.Rejected(why))
                peer.close(self.state.now)
        if own in self.below:
            self.below[own].add(session.replica)

    def _forget_below(self, name: str) -> None:
        for names in self.below.values():
            names.discard(name)

    def readmit(self, about: str) -> None:
        """Readmit a replica at once, because an operator wants it back."""
        for key in [k for k in self.readmission_backoff if k.replica == about]:
            del self.readmission_backoff[key]
        self.healing.forget(about)

    def is_welcome(self, record: Record, peer: Peer) -> bool:
        """Whether this newcomer may join as soon as its step is close enough to the job's."""
        if not peer.connected or peer.beat is None or self.kept_out(peer):
            return False
        if record.member(peer.session.replica) is not None or peer.session.replica in self.endings.finished:
            return False
        process = peer.process
        if self.state.now < self.readmission_backoff.get(process, Backoff()).until:
            return False
        # A process is kept out while it is still in the user code for which it was evicted.
        if process in self.evicted_in_user_code or self.ending.get(process.replica) == process:
            return False
        # The newcomer must know that it is outside the roster, and must not be evicted again at once.
        return peer.beat.epoch == record.epoch and not self.state.suspicion(peer)


# --- refusals of sessions, as sentences that say what to do; empty if the session may stand ---------------


def replaced(session: m.OpenSession, liveness: Liveness) -> str:
    """Refuse a session if a newer process of its replica is here."""
    peer = liveness.peers.get(session.replica)
    if peer is None or peer.incarnation <= session.incarnation:
        return ""
    return f"a newer process of {session.replica} has taken its place: this one must end"


def number_to_pass(session: m.OpenSession, liveness: Liveness, record: Record | None, now: float) -> int:
    """The incarnation above which this older process may start again; 0: it must end for good.

    It may where a process whose host has the right time would be let in now. A process that has been in an
    epoch was replaced, and must end.
    """
    peer = liveness.peers.get(session.replica)
    if peer is None or session.roster:
        return 0
    entry = record.member(session.replica) if record is not None else None
    newest = max(peer.incarnation, entry.incarnation if entry is not None else 0)
    return 0 if taken(replace(session, incarnation=newest + 1), liveness, record, now) else newest


def taken(session: m.OpenSession, liveness: Liveness, record: Record | None, now: float) -> str:
    """Refuse a session if an older process of its replica lives, by its session or checkpoint server."""
    peer = liveness.peers.get(session.replica)
    entry = record.member(session.replica) if record is not None else None
    older = [as_member(peer.session)] if peer is not None else []
    older += [entry] if entry is not None else []
    for member in older:
        if member.incarnation >= session.incarnation or vouches(session, member):
            continue
        if liveness.proven_dead(member):
            continue
        is_same = peer is not None and peer.incarnation == member.incarnation
        is_heard = peer is not None and is_same and peer.connected and now - peer.seen < HALF_OPEN_S
        if is_heard or liveness.says_running(member, now):
            return (
                f"replica id {session.replica} is taken by a living process: give every replica its own "
                "FABRIC_REPLICA, or end the other process first"
            )
    return ""


def unheard(session: m.OpenSession, liveness: Liveness, record: Record | None, now: float) -> str:
    """Let a newer process wait while the roster's process of its replica may still come to this leader."""
    entry = record.member(session.replica) if record is not None else None
    if entry is None or entry.incarnation >= session.incarnation or vouches(session, entry):
        return ""
    if session.ended is not None and session.ended.incarnation == entry.incarnation:
        return ""  # the member has ended with the job, and has left this note on its host
    is_heard = liveness.heard_at(entry) > -math.inf or liveness.proven_dead(entry)
    if is_heard or now >= liveness.grace_until:
        return ""
    return (
        f"the member of replica id {session.replica} has not spoken to this lighthouse since its election: "
        "this process waits until that member has had the time to come back"
    )


def unlike(session: m.OpenSession, liveness: Liveness, record: Record | None) -> str:
    """Refuse a session if a replica has other settings, or asks for the same data slot.

    The norm is a member of the record, else another process of a replica that the record names, else the
    replica that spoke first. A member is not refused for the settings of a process that counts less.
    """
    own = standing(session.process, record)
    for other in liveness.peers.values():
        # Compare only connected replicas: all replicas of a job may come back with new settings.
        if other.session.replica == session.replica or not other.connected:
            continue
        if standing(other.process, record) < own:
            continue
        why = _difference(session, other.session)
        if why:
            return why
        if session.data_slot < 0:
            break  # the other sessions were compared with this one when they opened
    return ""


def _difference(session: m.OpenSession, other: m.OpenSession) -> str:
    if session.data_slot >= 0 and session.data_slot == other.data_slot:
        return (
            f"{session.replica} and {other.replica} both ask for data slot {session.data_slot}: give every "
            "replica one of its own"
        )
    return incompatibility(session, other)
