"""Joins: how newcomers get the state, and enter the roster."""

from collections import Counter

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Record, SnapshotRef, counted
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState, LeaderOutbox, RosterLimits
from fabric.protocol.messages import network as m
from fabric.protocol.rules.own_memory import ALWAYS_KEPT, KEPT, own_snapshot

# If all members missed the step of a snapshot, the leader asks for a later step after this many seconds.
SERVE_AGAIN_S = 0.1
# Members hold a state for so long for a replica whose ranks start on another host.
EXPECTED_S = 120.0
# A newcomer whose gap has not shrunk for this many steps cannot catch up by replay.
GAP_STEPS = 10


class Serving(Struct):
    """A snapshot promised to one newcomer, and the members' answers."""

    step: int = -1
    epoch: int = 0
    tries: int = 0  # how many snapshots the leader has offered to the newcomer
    again: bool = False
    lost: bool = False  # the newcomer holds no usable state, and none was looked for in its own memory
    gap: int = -1  # the newcomer's smallest distance to the job's step since its newest snapshot
    gap_at: int = 0  # the job's step when ``gap`` was smallest
    blocking_reason: str = ""  # why the newcomer enters by a blocking join; empty: by replay
    asked: set[str] = field(default_factory=set)
    taken: dict[str, str] = field(default_factory=dict)  # replica -> digest of its snapshot for the newcomer
    missed: set[str] = field(default_factory=set)
    has_sources: bool = False
    asked_at: float = 0.0
    disputed: int = -1  # the newest step about which an event has named a dispute
    expected_until: float = 0.0  # the newcomer has not asked yet, and is expected to until then


class Joins(Struct, eq=False):
    """Rule 4: serves newcomers and admits them."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    writer: RecordWriter
    admission: Admission
    evidence: FailureEvidence
    bases: BaseChoice
    serving: dict[str, Serving] = field(default_factory=dict)

    def expect(self, replica: str) -> None:
        """Let members snapshot a state for a replica whose ranks start on another host, before it asks."""
        record = self.state.record
        if record is None or record.member(replica) is not None or replica in self.serving:
            return
        if self.state.is_settled(record):  # else the members may park before a further step
            self.ask_to_serve(record, replica, self._next_step(record))
            self.serving[replica].expected_until = self.state.now + EXPECTED_S

    def on_request_state(self, peer: Peer, message: m.RequestState) -> None:
        """Offer a snapshot. After two failed replays the newcomer enters by a blocking join instead."""
        if self.state.in_force(peer):
            return
        name = peer.session.replica
        old = self.serving.get(name, Serving())
        cut = self.state.record is not None and bool(self.admission.out_of_reach(self.state.record, peer))
        serving = self.serving[name] = Serving(tries=old.tries if message.lost and not cut else 0)
        serving.lost = message.lost and not old.tries
        gradients = self.state.top_step() - old.step
        if self._is_expected(old) and old.asked and gradients <= min(KEPT - 1, peer.session.replay_steps):
            serving = self.serving[name] = replace(old, expected_until=0.0, lost=serving.lost)
        self.outbox.record_event("needs state", name, message.why)
        if not peer.session.replay:
            serving.blocking_reason = "its settings turn replay off"
        elif serving.tries > 1:
            serving.blocking_reason = f"its catch-up failed twice: {message.why}"

    def forget(self, replica: str) -> None:
        """Forget the process before of this replica, but for the promises to it, which must end."""
        if replica in self.serving and not self._is_expected(self.serving[replica]):
            self.serving[replica] = Serving(has_sources=True)

    def _is_expected(self, serving: Serving) -> bool:
        return serving.expected_until > self.state.now

    def take_over(self, session: m.OpenSession) -> None:
        """Take over, to end them, the promises to newcomers for which an earlier leader asked this member."""
        for joiner in session.serves:
            self.serving.setdefault(joiner, Serving(has_sources=True))

    def on_taken(self, peer: Peer, message: m.SnapshotTaken) -> None:
        serving = self.serving.get(message.joiner)
        if serving is not None and serving.step == message.step and message.digest:
            serving.taken[peer.session.replica] = message.digest
        elif serving is not None and serving.step == message.step:
            serving.missed.add(peer.session.replica)

    def serve(self, record: Record) -> None:
        """Ask the members to snapshot at a later step, and tell the newcomer the sources."""
        if not self.serving:
            return
        for joiner, serving in list(self.serving.items()):
            peer, member = self.state.liveness.peers.get(joiner), record.member(joiner)
            inside = peer is not None and member is not None and peer.incarnation == member.incarnation
            caught_up = inside and member is not None and self.state.knows(member)
            in_grace = peer is None and self.state.now < self.state.liveness.grace_until
            if in_grace or (self._is_expected(serving) and not inside):
                continue  # it may still come to this leader
            if peer is None or not peer.connected or caught_up:
                del self.serving[joiner]
                if self.state.record is not None:
                    for member in self.state.record.roster:
                        self.outbox.send(member.replica, m.StopServing(self.state.record.fence, joiner))
            elif inside or serving.blocking_reason or self.admission.is_penalised(record, peer):
                continue
            elif self.admission.out_of_reach(record, peer):
                continue  # the newcomer could not fetch the published gradients
            elif serving.has_sources:
                self._watch_gap(record, peer, serving)
            elif serving.lost and member is None and self._serve_own_memory(record, peer, serving):
                continue
            else:
                self._serve_members_state(record, joiner, serving, self._next_step(record))

    def _next_step(self, record: Record) -> int:
        """The next step that all members can snapshot: the present one where they stand still."""
        return self.state.top_step() + (0 if self.state.is_parked(record) else 1)

    def _serve_members_state(self, record: Record, joiner: str, serving: Serving, step: int) -> None:
        """Ask the members for snapshots of ``step``; then tell the newcomer who has one."""
        answered = (serving.asked & set(record.names)) <= (set(serving.taken) | serving.missed)
        late = self.state.now - serving.asked_at >= SERVE_AGAIN_S
        if serving.asked and answered and serving.taken:
            self._send_sources(record, joiner, serving)
        elif not serving.asked or (answered and late):
            self.ask_to_serve(record, joiner, step)

    def _watch_gap(self, record: Record, peer: Peer, serving: Serving) -> None:
        """End a replay that does not get closer to the job's step."""
        if not peer.session.replay or not self.state.is_of_generation(peer):
            return
        top = self.state.top_step()
        gap = top - peer.step
        if serving.gap < 0 or gap < serving.gap:
            serving.gap, serving.gap_at = gap, top
        if gap <= 1 or top - serving.gap_at < GAP_STEPS:
            return
        name, why = peer.session.replica, f"its gap of {gap} steps has not shrunk for {GAP_STEPS} steps"
        if serving.tries > 1:
            serving.blocking_reason = why
        else:
            self.serving[name] = Serving(tries=serving.tries, again=True)
        self.outbox.record_event("too slow", name, why)

    def ask_to_serve(self, record: Record, joiner: str, step: int) -> None:
        old = self.serving.get(joiner, Serving())
        names = {x.replica for x in record.roster if not x.blocking_join}
        self.serving[joiner] = Serving(
            step=step,
            epoch=record.epoch,
            tries=old.tries,
            again=old.again,
            disputed=old.disputed,
            asked=names,
            asked_at=self.state.now,
        )
        for name in sorted(names):
            self.outbox.send(name, m.TakeSnapshotFor(record.fence, joiner, step))

    def begin_epoch(self) -> None:
        """Ask the members of the new epoch for snapshots again."""
        for serving in self.serving.values():
            if not serving.has_sources:
                serving.asked.clear()

    def serve_again(self, replica: str) -> None:
        """Repeat requests to a replica with a new session: requests over its earlier session may be lost."""
        own = self.serving.get(replica)
        if own is not None and self.state.is_blocking_join(replica):
            own.has_sources = False
        for joiner, serving in self.serving.items():
            if replica in serving.asked and replica not in serving.taken and self.state.record is not None:
                self.outbox.send(replica, m.TakeSnapshotFor(self.state.record.fence, joiner, serving.step))

    def _agreed_digest(self, record: Record, joiner: str, serving: Serving) -> str:
        """The digest of most snapshots; empty after a dispute, in which no member can be believed.

        Members of one layout took unequal snapshots of one step, so a state is wrong. Their next digests show
        the wrong one. A newcomer that got a wrong state before would make it the majority. Members whose
        settings turn replay off do not expect equal states.
        """
        cuts = {x.replica: x.cuts for x in record.roster}
        alike = {(cuts.get(name, ""), digest) for name, digest in serving.taken.items()}
        digest, times = Counter(serving.taken.values()).most_common(1)[0]
        peers = self.state.liveness.peers
        may_differ = all(not peers[name].session.replay for name in serving.taken if name in peers)
        if may_differ or len(alike) == len({cut for cut, _ in alike}) or 2 * times > len(serving.taken):
            return digest
        digests = ", ".join(f"{name} ({digest[:8]})" for name, digest in sorted(serving.taken.items())[:4])
        why = f"members disagree about the state at step {serving.step}: {digests}; it gets none of them"
        if serving.disputed != serving.step:
            serving.disputed = serving.step
            self.outbox.record_event("disputed", joiner, why)
        return ""

    def _send_sources(self, record: Record, joiner: str, serving: Serving) -> None:
        digest = self._agreed_digest(record, joiner, serving)
        if not digest:
            serving.taken, serving.missed = {}, set(serving.asked)  # ask for a later step in a moment
            return
        holders = [self.state.addressed(x) for x in record.roster if serving.taken.get(x.replica) == digest]
        urls = tuple(a.ckpt for x in holders for a in x.addresses)
        state = SnapshotRef(record.generation, serving.step, digest)
        self._send_state(record, joiner, state, urls, f"from {len(holders)} replicas")

    def _serve_own_memory(self, record: Record, peer: Peer, serving: Serving) -> bool:
        """Let the newcomer begin from its own hosts' snapshot, if the gradients since then have fewer bytes.

        Return whether there is such a snapshot. Of a lost host other servers must hold the parts.
        """
        serving.lost, joiner, top = False, peer.session.replica, self.state.top_step()
        held = self.bases.held_states([peer])
        held = {ref: urls for ref, urls in held.items() if ref not in self.bases.mistrusted}
        own = set(self.state.liveness.servers.urls_of(as_member(peer.session)))
        decision = self.state.epoch.decision
        kept_from = (decision.step if decision is not None else top) - ALWAYS_KEPT
        state = own_snapshot(held, own, (record.generation, top), kept_from, peer.session.replay_steps)
        if state is None:
            return False
        self.ask_to_serve(record, joiner, state.step)  # so that they keep the gradients from there on
        text = f"from its own hosts' memory, and {counted(top - state.step, 'gradient')}"
        self._send_state(record, joiner, state, tuple(sorted(held[state])), text)
        return True

    def _send_state(
        self, record: Record, joiner: str, state: SnapshotRef, urls: tuple[str, ...], text: str
    ) -> None:
        serving = self.serving[joiner]
        serving.has_sources = True
        serving.tries += 1
        self.outbox.record_event("serves", joiner, f"step {state.step} {text}")
        self.outbox.send(joiner, m.StateSources(record.fence, state, urls, serving.again))

    def serve_blocking_joins(self, record: Record) -> None:
        """Let the members snapshot the step of the decision, where they stand, for the newcomer to fetch."""
        for name in self.state.blocking_joiners(record):
            assert self.state.epoch.decision is not None
            serving = self.serving.get(name)
            if serving is None or serving.epoch != record.epoch:
                self.ask_to_serve(record, name, self.state.epoch.decision.step)
            elif not serving.has_sources:
                self._serve_members_state(record, name, serving, self.state.epoch.decision.step)

    def admit_blocking_join(self, record: Record) -> bool:
        """Admit a newcomer that cannot catch up by replay: the members wait until it has loaded its state.

        One for which they waited too long first loads a newer state outside, so that the join is short.
        """
        for name, serving in list(self.serving.items()):
            peer = self.state.liveness.peers.get(name)
            if not serving.blocking_reason or peer is None or not self.admission.is_welcome(record, peer):
                continue
            if self.admission.take_late(peer.process):
                self.serving[name] = Serving(tries=serving.tries, again=peer.session.replay)
                continue
            newcomer = replace(
                as_member(peer.session), joining=True, since=record.epoch + 1, blocking_join=True
            )
            why = (
                f"{name} joins while the others wait for its state, at most "
                f"{self.state.join_stall_s(name):g} s: {serving.blocking_reason}"
            )
            incident_id = self.outbox.loss_incidents.get(name, "")
            self.writer.write_epoch(
                record, (*record.roster, newcomer), forced=True, why=why, incident_id=incident_id
            )
            return True
        return False

    def admit(self, record: Record) -> bool:
        outside = record.strangers(self.state.liveness.peers.keys())
        room = self.limits.most - len(record.roster)
        if room <= 0:
            return False
        near = self.state.top_step() - 1 if outside else 0
        ready = [
            p
            for p in map(self.state.liveness.peers.__getitem__, outside)
            if p.generation == record.generation and p.step >= near and self.admission.is_welcome(record, p)
        ]
        if not ready:
            return self.admit_blocking_join(record)
        ready.sort(key=lambda p: p.session.replica)
        # Spares are admitted last, and only as many spares as members are missing.
        wanted = [p for p in ready if not self.evidence.stands_by(p)][:room]
        spares = [p for p in ready if self.evidence.stands_by(p)]
        ready = wanted + spares[: max(0, self.limits.full - len(record.roster) - len(wanted))]
        since = record.epoch + 1
        newcomers = tuple(replace(as_member(p.session), joining=True, since=since) for p in ready)
        names, losses = ", ".join(x.replica for x in newcomers), self.outbox.loss_incidents
        self.writer.write_epoch(
            record,
            record.roster + newcomers,
            forced=self.state.is_parked(record),
            why=f"{names} joins",
            incident_id=next((losses[x.replica] for x in newcomers if x.replica in losses), ""),
        )
        return True
