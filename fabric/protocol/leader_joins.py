"""How replicas come into a job and leave it: first and cold start, state for a newcomer, admission, drain."""

from collections import Counter
from dataclasses import replace

from fabric.model import Base, Member, Record, SnapshotRef
from fabric.protocol import messages as m
from fabric.protocol.leader_base import SERVE_AGAIN_S, LeaderBase, Serving, Setback, as_member
from fabric.protocol.liveness import Peer


class Joins(LeaderBase):
    """A leader that starts jobs and lets replicas in and out."""

    # --- serving newcomers -----------------------------------------------------------------------------

    def on_need_state(self, peer: Peer, message: m.NeedState) -> None:
        if not self._in_force(peer):
            self.serving[peer.session.replica] = Serving()
            self._tell("needs state", peer.session.replica, message.why)

    def on_taken(self, peer: Peer, message: m.Taken) -> None:
        serving = self.serving.get(message.joiner)
        if serving is not None and serving.step == message.step:
            serving.taken[peer.session.replica] = message.digest

    def on_missed(self, peer: Peer, message: m.Missed) -> None:
        serving = self.serving.get(message.joiner)
        if serving is not None and serving.step == message.step:
            serving.missed.add(peer.session.replica)

    def _serve(self, record: Record) -> None:
        """Catch-up: have the members snapshot at a step to come, and tell the newcomer who did."""
        names = {x.replica for x in record.roster}
        for joiner, serving in list(self.serving.items()):
            peer, member = self.liveness.peers.get(joiner), record.member(joiner)
            inside = peer is not None and member is not None and peer.incarnation == member.incarnation
            caught_up = inside and member is not None and self._knows(member)
            if peer is None or not peer.connected or caught_up:
                del self.serving[joiner]
                self._end_serving(joiner)
            elif not inside and not serving.told:
                answered = (serving.asked & names) <= (set(serving.taken) | serving.missed)
                late = self._now - serving.asked_at >= SERVE_AGAIN_S
                if serving.asked and answered and serving.taken:
                    self._tell_sources(record, joiner, serving)
                elif not serving.asked or (answered and late):
                    self._ask_to_serve(record, joiner)

    def _ask_to_serve(self, record: Record, joiner: str) -> None:
        step = self._top_step(record) + (0 if self._is_parked(record) else 1)
        self.serving[joiner] = Serving(step=step, asked=set(record.names), asked_at=self._now)
        for member in record.roster:
            self._send(member.replica, m.Serve(record.fence, joiner, step))

    def _serve_again(self, replica: str) -> None:
        """A member's session began anew: what was asked of it may have been lost."""
        for joiner, serving in self.serving.items():
            if replica in serving.asked and replica not in serving.taken and self.record is not None:
                self._send(replica, m.Serve(self.record.fence, joiner, serving.step))

    def _tell_sources(self, record: Record, joiner: str, serving: Serving) -> None:
        digest = Counter(serving.taken.values()).most_common(1)[0][0]
        urls = tuple(self._ckpt(x) for x in record.roster if serving.taken.get(x.replica) == digest)
        serving.told = True
        state = SnapshotRef(record.generation, serving.step, digest)
        self._tell("serves", joiner, f"step {serving.step} from {len(urls)} replicas")
        self._send(joiner, m.Sources(record.fence, state, urls))

    def _end_serving(self, joiner: str) -> None:
        if self.record is not None:
            for member in self.record.roster:
                self._send(member.replica, m.ServeEnd(self.record.fence, joiner))

    # --- admitting and draining ------------------------------------------------------------------------

    def _admit(self, record: Record) -> bool:
        ready = [p for p in self.liveness.peers.values() if self._may_join(record, p)]
        room = self.config.policy.max_replicas - len(record.roster)
        if not ready or room <= 0:
            return False
        ready = sorted(ready, key=lambda p: p.session.replica)[:room]
        newcomers = tuple(replace(as_member(p.session), fresh=True) for p in ready)
        names = ", ".join(x.replica for x in newcomers)
        self._write_epoch(
            record, record.roster + newcomers, forced=self._is_parked(record), why=f"{names} joins"
        )
        return True

    def _may_join(self, record: Record, peer: Peer) -> bool:
        if not peer.connected or peer.beat is None or peer.session.replica in self.draining:
            return False
        if record.member(peer.session.replica) is not None or peer.session.replica in self.finished:
            return False
        setback = self.setbacks.get((peer.session.replica, peer.incarnation), Setback())
        if self._now < setback.until:
            return False
        if peer.beat.epoch != record.epoch or self._doubt(peer):
            # It does not know yet that it is outside, or would be evicted at once.
            return False
        return peer.generation == record.generation and self._top_step(record) - peer.step <= 1

    def _drain(self, record: Record) -> bool:
        names = [x for x in record.roster if x.replica in self.draining]
        leaving = [x for x in record.roster if x.leaving]
        self._dismiss(record)
        left = tuple(x for x in record.roster if not x.leaving)
        if leaving and any(self._knows(x) for x in left):
            self._write_epoch(record, left, False, f"{_names(leaving)} leaves")
            return True
        if not names or all(x.replica in self.draining for x in record.roster):
            return False
        roster = tuple(replace(x, leaving=x.leaving or x in names) for x in record.roster)
        self._write_epoch(record, roster, False, f"{_names(names)} is being drained")
        return True

    def _dismiss(self, record: Record) -> None:
        """Whoever is to leave and is outside already need not come back."""
        for name in [n for n in self.draining if record.member(n) is None]:
            reason = f"{name} is {self.draining[name]}: start it again when it is wanted"
            self._send(name, m.Rejected(reason))

    # --- starting --------------------------------------------------------------------------------------

    def _start_again(self, record: Record) -> bool:
        """Rule 6: only when no member that may still be committing is merely out of sight. Who has caught
        up to the end of the job from outside has proved that nothing is left to do."""
        if self.finished:
            self._write_complete(record, max(self.finished.values()))
            return True
        limit = self.config.autonomy_s + self.config.autonomy_margin_s
        for member in record.roster:
            if not self._knows(member) or member.replica in self.epoch.fallen:
                continue
            if self.liveness.confirmed(member):
                continue
            if not self.liveness.out_of_contact(member, self._now, limit):
                return True
        self._start(record)
        return True

    def _start(self, record: Record | None) -> None:
        """Rule 6: a new generation from the newest state that anybody still holds."""
        policy = self.config.policy
        open_ = sorted(
            (p for p in self.liveness.peers.values() if p.connected and not self._doubt(p)),
            key=lambda p: p.session.replica,
        )
        if not open_ or len(open_) < policy.min_replicas:
            self.waiting_since = None
            return
        if self.waiting_since is None:
            self.waiting_since = self._now
        waited = self._now - self.waiting_since
        if len(open_) < policy.start_replicas and waited < policy.start_wait_s:
            return
        self.waiting_since = None
        peers = open_[: policy.max_replicas]
        base = self._base(peers)
        epoch = (record.epoch if record else 0) + 1
        generation = (record.generation if record else 0) + 1
        self._write(
            Record(
                store_id=self.store_id,
                generation=generation,
                cold=epoch,
                epoch=epoch,
                forced=epoch,
                nonce=self._nonce(),
                roster=tuple(as_member(p.session) for p in peers),
                base=base,
                reason=self._start_reason(record, base),
            )
        )

    def _start_reason(self, record: Record | None, base: Base) -> str:
        if record is None:
            return "first start"
        known = max(self._top_step(record), base.step)
        lost = f", {known - base.step} steps lost with the memory that held them" if known > base.step else ""
        return f"cold start from step {base.step} of generation {base.generation}{lost}"

    def _base(self, peers: list[Peer]) -> Base:
        """The highest (generation, step) that a checkpoint server holds, and who holds it."""
        held: dict[SnapshotRef, set[str]] = {}
        for pulse in self.liveness.pulses.values():
            if pulse.connected and pulse.ckpt:
                for ref in pulse.snapshots:
                    held.setdefault(ref, set()).add(pulse.ckpt)
        if not held:
            # No checkpoint server talks to me: what the trainers say of theirs may be out of date.
            for peer in peers:
                for ref in peer.session.snapshots:
                    held.setdefault(ref, set()).add(peer.session.ckpt)
        if not held:
            first = peers[0].session
            return Base(first.generation, first.step, first.digest, (first.ckpt,))
        best = max(held, key=lambda ref: (ref.generation, ref.step, len(held[ref]), ref.digest))
        return Base(best.generation, best.step, best.digest, tuple(sorted(held[best])))


def _names(members: list[Member]) -> str:
    return ", ".join(x.replica for x in members)
