"""The members that the next epoch leaves out, and the answer to an abort: the members rebuild their ring."""

from msgspec import Struct, field

from fabric.model import Member, Record, first_of
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.starts import Starts
from fabric.protocol.leader.state import JobState, LeaderOutbox, Mark
from fabric.protocol.messages import network as m
from fabric.protocol.rules.link_graph import missing_links, reachable_set
from fabric.protocol.rules.wait_graph import (
    RingRebuilds,
    StragglerTracker,
    blamed_link,
    ring_order,
    root_waiters,
)


class Evictions(Struct, eq=False):
    """Rule 2: schedules evictions, and writes the forced epoch without the evicted members."""

    state: JobState
    outbox: LeaderOutbox
    writer: RecordWriter
    evidence: FailureEvidence
    starts: Starts
    admission: Admission
    endings: Endings
    stragglers: StragglerTracker = field(default_factory=StragglerTracker)

    def begin_generation(self) -> None:
        self.stragglers = StragglerTracker()

    def schedule(self, replica: str, reason: str, *marks: Mark) -> None:
        """Leave this member out of the next epoch."""
        epoch = self.state.epoch
        epoch.mark(replica, marks)
        if replica in epoch.pending_evictions or not self.state.lists(replica):
            return
        epoch.leave_out(replica, reason, self.state.now)
        self.outbox.record_event("evicting", replica, reason, self.state.next_incident_id())

    def cancel(self, record: Record) -> None:
        """Cancel the eviction of each member heard again with a good state, because none could replace it."""
        epoch = self.state.epoch
        for member in record.roster:
            if member.replica not in epoch.pending_evictions or epoch.has(member.replica, Mark.USELESS):
                continue
            if not self.state.liveness.failure_reason(member, self.state.now):
                epoch.keep(member.replica)
                why = "it goes on, because no other member could take over"
                self.outbox.record_event("heard again", member.replica, why)

    def evict(self, record: Record) -> bool:
        """Rule 2: write the epoch without these members. If no other knows the state, try a cold start."""
        for member in self.state.liveness.suspects(record.roster, self.state.now):
            if member.replica not in self.state.epoch.pending_evictions:
                reason = self.state.liveness.failure_reason(member, self.state.now)
                if reason:
                    self.schedule(member.replica, reason)
        pending = self.state.epoch.pending_evictions
        if not any(self.state.knows(x) for x in record.roster if x.replica not in pending):
            self.cancel(record)
        if not pending:
            return False
        left = tuple(x for x in record.roster if x.replica not in pending)
        if not any(self.state.knows(x) for x in left):
            return self.starts.start_again(record)
        if self.state.now - self.state.epoch.evictions_since < self.state.config.coalesce_s:
            return True
        why = "; ".join(f"{name} evicted: {reason}" for name, reason in sorted(pending.items()))
        self.evidence.note_failures(record)
        self.writer.write_epoch(record, left, forced=True, why=why)
        return True

    def evict_unresponsive(self, record: Record) -> None:
        """Evict a living member whose report takes longer than its user code may take.

        User code may hold the interpreter's lock, so the other members wait for that long.
        """
        reports, pending = self.state.epoch.reports, self.state.epoch.pending_evictions
        if not record.is_forced or self.state.epoch.decision is not None:
            return
        answered = (x for x in record.roster if x.replica in reports and x.replica not in pending)
        if not any(self.state.knows(x) for x in answered):
            return
        # Count seconds only while this leader could hear the member: not while stopped or not yet elected.
        waited_s = self.state.now - max(self.state.epoch.since, self.state.liveness.elected)
        for member in record.roster:
            peer = self.state.liveness.peers.get(member.replica)
            if member.replica in reports or peer is None or waited_s < self.state.patience_s(peer):
                continue
            self.schedule(
                member.replica, f"it lives, but did not answer epoch {record.epoch} for {waited_s:.0f} s"
            )

    def evict_stragglers(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Evict members whose user code takes longer than ``user_code_s``, or than ``busy`` announced."""
        name = peer.session.replica
        if beat.step > self.stragglers.since.get(name, (beat.step, 0.0))[0]:
            self.stragglers.came(name)
        record = self.state.record
        if not beat.waiting_for or record is None or beat.epoch != record.epoch:
            return
        if not record.lists(*peer.process):
            return
        self.stragglers.report(name, beat.waiting_for)
        for other in beat.waiting_for:
            late, excused = self.state.liveness.peers.get(other), other in self.endings.finished
            if late is None or excused or not self.state.lists(other) or self.state.is_blocking_join(other):
                continue
            waited_s = self.stragglers.waited_s(other, beat.step, self.state.now)
            if waited_s >= self.state.patience_s(late) and self.state.is_spared_by(other):
                busy = late.beat.busy if late.beat is not None else ""
                doing = f"busy with {busy}" if busy else "in user code"
                self.admission.keep_out_of_rounds(late)
                self.schedule(other, f"it was {doing} while the others waited for {waited_s:.0f} s")

    def evict_slow_joiners(self, record: Record) -> None:
        """Evict members in a blocking join whose state does not arrive within the time of one exchange."""
        for name in self.state.blocking_joiners(record):
            limit_s = self.state.join_stall_s(name)
            if self.state.now - self.state.epoch.decided_at >= limit_s:
                why = f"the others waited {limit_s:g} s for its state, which did not arrive"
                self.schedule(name, why, Mark.SLOW)


# A process from which neither source was heard for this many seconds may be dead. Before the leader acts on a
# missing link to a silent process, it waits for the verdict on that process.
QUIET_S = 0.75
# After a test of links their ends come later than after a cut, so the leader waits longer for all complaints.
TEST_PATIENCE = 3


class RingRebuilder(Struct, eq=False):
    """Rule 3: ends every abort with an epoch."""

    state: JobState
    outbox: LeaderOutbox
    writer: RecordWriter
    evictions: Evictions
    ring_rebuilds: RingRebuilds = field(default_factory=RingRebuilds)

    def on_aborted(self, peer: Peer, message: m.Aborted) -> None:
        """Note an abort in any epoch since the last forced epoch: only the next forced epoch answers it.

        A planned epoch does not free members that wait in the epoch before it. The abort of a member that it
        left out stops the others too. A process that none of these epochs lists was in none of their rounds.
        """
        name = peer.session.replica
        has_left = self.evictions.admission.ending.get(name) == peer.process
        if not (self.state.in_force(peer) or has_left):
            return
        if message.waiting_for or message.stalled:
            # This member was in the round that ends, so a wait for it in the next round begins at zero.
            self.evictions.stragglers.came(name)
        if not self.state.is_recent(message.fence):
            return
        if self.state.epoch.on_aborted(name, message, self.state.now):
            self.outbox.record_event("aborted", name, message.why, self.state.next_incident_id())

    def start_over(self) -> None:
        self.ring_rebuilds = RingRebuilds()

    def note_step(self) -> None:
        """Note that a member has committed a further step, so the newest ring works."""
        if self.ring_rebuilds.tries:
            self.start_over()

    def rebuild(self, record: Record) -> bool:
        """Answer every abort with a new epoch.

        Leave out members that others cannot reach, newcomers without links, and a member that stalled the
        exchange twice without an excuse. Otherwise the same members go on, in a ring order that avoids the
        links of which members complained.
        """
        epoch = self.state.epoch
        if not epoch.aborted or self.state.now < self.rebuild_due:
            return False
        if self._leave_out_unreachable(record) or self._leave_out_newcomers(record):
            return True
        ring_rebuilds, aborted = self.ring_rebuilds, epoch.aborted
        ring_rebuilds.tries += 1
        ring_rebuilds.blame.update(a.about for a in aborted.values() if self.state.lists(a.about))
        for name, message in aborted.items():
            link = blamed_link(record.names, message.about, by=name)
            if link is not None:
                ring_rebuilds.links[link] += 1
        if any(a.stalled for a in aborted.values()):
            waiting = {name: a.waiting_for for name, a in aborted.items()}
            ring_rebuilds.stuck.update(root_waiters(waiting, record.names))
        worst, why = self.worst(record)
        if worst and self.state.is_spared_by(worst):
            self.evictions.schedule(worst, why)
            self.start_over()
            return True
        why = "; ".join(f"{name}: {a.why}" for name, a in sorted(epoch.aborted.items()))
        by_name = {x.replica: x for x in record.roster}
        roster = tuple(by_name[name] for name in ring_order(record.names, self.ring_rebuilds.links))
        self.writer.write_epoch(record, roster, forced=True, why=f"ring rebuilt ({why})")
        return True

    def _leave_out_unreachable(self, record: Record) -> bool:
        """Keep the largest set of members that reach each other; of equally large sets the more senior one.

        Replicas that were left out for a link count as newcomers: of one host's links the ends come one after
        the other. Wait while a member without a link is silent, because it may be dead.
        """
        unreachable = self.state.epoch.unreachable
        if not missing_links(unreachable, record.names):
            return False
        seniority = sorted(record.roster, key=lambda x: (x.since, x.data_slot, x.replica))
        outside = self._left_out_before(record)
        newcomers = [x.replica for x in seniority if not self.state.knows(x)] + list(outside)
        names = [x.replica for x in seniority] + list(outside)
        missing = missing_links({**unreachable, **outside}, names)
        kept = set(reachable_set(names, missing, newcomers))
        cut: dict[str, set[str]] = {}
        for a, b in missing:
            cut.setdefault(a, set()).add(b)
            cut.setdefault(b, set()).add(a)
        live = self.state.liveness
        heard = [max(live.heard_at(x), live.elected) for x in record.roster if x.replica in cut]
        if any(self.state.now - at > QUIET_S for at in heard):
            self.state.epoch.wait_for_verdict(self.state.now)
            return True
        lost_bytes = self._lost_bytes()
        act = f"exchange messages of {lost_bytes} bytes" if lost_bytes else "reach each other"
        for member in record.roster:
            if member.replica not in kept:
                others = sorted(cut[member.replica] & kept)
                self._leave_out(member, f"it and {first_of(others)} cannot {act}")
        return True

    def _left_out_before(self, record: Record) -> dict[str, list[str]]:
        """The replicas that were left out for a link, and for each the members that it still cannot reach."""
        admission, peers = self.evictions.admission, self.state.liveness.peers
        outside = [peers[name] for name in sorted(record.strangers(peers.keys()))]
        return {
            x.session.replica: admission.out_of_reach(record, x)
            for x in outside
            if x.connected and self.state.is_of_generation(x) and not self.state.suspicion(x)
            if admission.healing.calm_s(x.process) and admission.out_of_reach(record, x)
        }

    def _lost_bytes(self) -> int:
        """Return the size of the messages whose loss has ended links; 0 if no test of links has ended any."""
        aborted = self.state.epoch.aborted.values()
        return max((a.lost_bytes for a in aborted if a.unreachable), default=0)

    def _leave_out(self, member: Member, why: str) -> None:
        """Leave out a member that did not fail. It comes back when its links have worked for a while."""
        self.evictions.schedule(member.replica, why, Mark.EXCUSED, Mark.CUT_OFF)
        self.start_over()

    def _leave_out_newcomers(self, record: Record) -> bool:
        """Leave out newcomers that a member could not link to and that have entered no round."""
        about = {a.about for a in self.state.epoch.aborted.values()}
        out = [x for x in record.roster if x.joining and not x.blocking_join and x.replica in about]
        out = [x for x in out if x.replica not in self.state.epoch.running]
        if not out or record.is_forced:
            return False
        for member in out:
            self._leave_out(member, "the others could not link to it, and have not waited for it")
        return True

    def worst(self, record: Record) -> tuple[str, str]:
        """The member to leave out, and why; two empty strings if no member is to blame."""
        ring_rebuilds = self.ring_rebuilds
        stuck = [name for name, times in ring_rebuilds.stuck.items() if times > 1 and self.state.lists(name)]
        if len(stuck) == 1:
            rounds = ring_rebuilds.stuck[stuck[0]]
            return stuck[0], f"all others waited for it in {rounds} rounds, and it waited for none of them"
        if ring_rebuilds.tries <= 3 or not ring_rebuilds.blame:
            return "", ""
        most = max(ring_rebuilds.blame.values())
        worst = [x.replica for x in record.roster if ring_rebuilds.blame[x.replica] == most]
        return (worst[-1], f"peers could not reach it {most} times") if worst else ("", "")

    @property
    def rebuild_due(self) -> float:
        """When the same members rebuild their ring after an abort, unless a death is noticed first."""
        if self.state.epoch.unreachable:
            patience = TEST_PATIENCE if self._lost_bytes() else 1
            return self.state.epoch.complained_at + patience * self.state.config.complaints_s
        delay_s = min(
            self.state.config.rebuild_s * 2**self.ring_rebuilds.tries, self.state.config.rebuild_limit_s
        )
        return self.state.epoch.aborted_at + float(delay_s)
