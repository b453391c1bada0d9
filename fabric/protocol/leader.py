"""The leader core: one job's membership, as the elected lighthouse decides it. Pure.

It holds the committed record, what sessions and pulses say, and at most one write in flight. After every
event ``_plan`` looks at all of it afresh and takes the first move that is due: start the job, evict the
dead, form again after an abort, decide a forced epoch, complete, drain, serve a newcomer, admit it.
Nothing is announced before the store has committed it (rule 1).
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fabric.model import Base, Fence, Member, Policy, Record, SnapshotRef
from fabric.protocol import leader_io as io
from fabric.protocol import messages as m
from fabric.protocol.decide import Evict, Undecidable, decide
from fabric.protocol.liveness import Liveness, LivenessConfig, Peer, PulseState

# Seconds without any event, though a deadline is due at least twice in them, after which a leader takes it
# that it was itself away.
DEAF_S = 1.2
# Seconds before members that all missed a step are asked for another one.
SERVE_AGAIN_S = 0.1
# Seconds that an evicted process waits before it is admitted again, doubled every time.
READMIT_S = 0.25
READMIT_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class LeaderConfig:
    """Seconds. ``coalesce_s``: deaths noticed within it share one epoch. ``reform_s``: how long after an
    abort a death may still show itself before the same members form again; doubled per try."""

    policy: Policy = field(default_factory=Policy)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    coalesce_s: float = 0.01
    reform_s: float = 0.1
    reform_limit_s: float = 5.0
    autonomy_s: float = 1800.0
    autonomy_margin_s: float = 60.0


@dataclass(slots=True)
class EpochState:
    """What is known about the epoch in force; begun anew with every record."""

    reports: dict[str, m.Report] = field(default_factory=dict)
    decision: m.Resume | None = None
    running: dict[str, int] = field(default_factory=dict)  # replica -> a round of it that it entered
    aborted: dict[str, m.Aborted] = field(default_factory=dict)
    aborted_at: float = 0.0
    condemned: dict[str, str] = field(default_factory=dict)
    fallen: set[str] = field(default_factory=set)  # hold nothing of worth: by their own word, or found wrong
    condemned_at: float = 0.0


@dataclass(slots=True)
class Serving:
    """A snapshot promised to one newcomer: the step, and who has answered how."""

    step: int = -1
    asked: set[str] = field(default_factory=set)
    taken: dict[str, str] = field(default_factory=dict)  # replica -> digest
    missed: set[str] = field(default_factory=set)
    told: bool = False
    asked_at: float = 0.0


class Leader:
    """See the module. ``entropy`` makes nonces; nothing else here is random."""

    def __init__(self, job: str, config: LeaderConfig, entropy: random.Random, now: float) -> None:
        self.job = job
        self.config = config
        self.entropy = entropy
        self.store_id = ""
        self.leading = False
        self.record: Record | None = None
        self.writing: Record | None = None
        self.reading = False
        self.liveness = Liveness(config.liveness, now)
        self.epoch = EpochState()
        self.serving: dict[str, Serving] = {}
        self.finished: dict[str, int] = {}
        self.draining: dict[str, str] = {}
        self.reforms = Reforms()
        self.setbacks: dict[tuple[str, int], Setback] = {}
        self.waiting_since: float | None = None
        self._now = now
        self._effects: list[io.Effect] = []

    # --- the contract ------------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        if now - self._now > DEAF_S:
            # I was stopped myself: that I heard nothing meanwhile says nothing of the others.
            self.liveness.elected = now
        self._now = now
        self._effects = []
        _HANDLERS[type(event)](self, event)
        if self.leading and self.writing is None and not self.reading:
            self._plan()
        return self._effects

    def next_deadline(self) -> float | None:
        """When to call again with Tick at the latest."""
        if not self.leading or (self.record is not None and self.record.complete):
            return None
        if self.record is None:
            return self._now + 0.5
        epoch, dues = self.epoch, [self.liveness.next_check(self.record.roster, self._now)]
        if epoch.condemned:
            dues.append(epoch.condemned_at + self.config.coalesce_s)
        if epoch.aborted:
            dues.append(epoch.aborted_at + self._reform_delay())
        return max(min(d for d in dues if d is not None), self._now + 0.001)

    # --- events ------------------------------------------------------------------------------------

    def on_elected(self, event: io.Elected) -> None:
        """Full credit to everybody, and the record announced to whoever has a session."""
        self.leading = True
        self.store_id = event.store_id
        self.record = event.record
        self.liveness.elected = self._now
        self.epoch = EpochState()
        if event.record is not None:
            self._announce(event.record)

    def on_opened(self, event: io.SessionOpened) -> None:
        session = event.session
        refusal = self._refusal(session)
        if refusal is not None:
            self._do(io.SendMember(session.replica, session.incarnation, refusal))
            self._tell("session refused", session.replica, refusal.reason)
            return
        known = self.liveness.peers.get(session.replica)
        self.liveness.peers[session.replica] = Peer(session, True, self._now)
        if known is None or known.incarnation != session.incarnation:
            self.finished.pop(session.replica, None)
            self.draining.pop(session.replica, None)
            self.serving.pop(session.replica, None)
            self._tell("session opened", session.replica, f"incarnation {session.incarnation}")
        if session.finished and self.record is not None and session.generation == self.record.generation:
            self.finished[session.replica] = session.step
        if self.record is not None:
            self._send(session.replica, m.Epoch(self.record))
            self._serve_again(session.replica)
            if self.record.complete:
                self._send(session.replica, m.Complete(self.record.fence, self.record.base.step))

    def _refusal(self, session: m.Session) -> m.Rejected | None:
        """Why this session cannot be: in a sentence that says what to do."""
        name, known = session.replica, self.liveness.peers.get(session.replica)
        if known is not None and known.incarnation > session.incarnation:
            return m.Rejected(f"a newer process of {name} has taken its place: this one must end")
        if known is not None and known.connected and known.incarnation < session.incarnation:
            pulse = self.liveness.pulses.get(name)
            gone = pulse is not None and pulse.trainer == "gone" and pulse.incarnation == known.incarnation
            if not gone and not session.predecessors_gone and self._now - known.seen < 10.0:
                return m.Rejected(
                    f"replica id {name} is taken by a living process: give every replica its own "
                    "FABRIC_REPLICA, or end the other process first"
                )
        for other in self.liveness.peers.values():
            if other.session.replica == name:
                continue
            difference = _difference(session, other.session)
            if difference:
                return m.Rejected(
                    f"{name} has other {difference} than {other.session.replica}: start every replica "
                    "with the same model, data set and batch sizes"
                )
        return None

    def on_closed(self, event: io.SessionClosed) -> None:
        peer = self.liveness.peers.get(event.replica)
        if peer is not None and peer.incarnation == event.incarnation and peer.connected:
            peer.connected = False
            peer.closed = self._now

    def on_member(self, event: io.FromMember) -> None:
        peer = self.liveness.peers.get(event.replica)
        if peer is None or peer.incarnation != event.incarnation or not peer.connected:
            return
        peer.seen = self._now
        handler = _FROM_MEMBER.get(type(event.message))
        if handler is not None:
            handler(self, peer, event.message)

    def on_pulse(self, event: io.PulseSeen) -> None:
        pulse, pulses = event.pulse, self.liveness.pulses
        known = pulses.get(pulse.replica)
        if known is not None and known.incarnation > pulse.incarnation:
            return
        same = known is not None and (known.incarnation, known.trainer) == (pulse.incarnation, pulse.trainer)
        if not same and pulse.trainer in ("gone", "stopped"):
            self._tell("trainer " + pulse.trainer, pulse.replica, "seen by its checkpoint server")
        pulses[pulse.replica] = PulseState(
            incarnation=pulse.incarnation,
            trainer=pulse.trainer,
            since=known.since if same and known is not None else self._now,
            seen=self._now,
            ckpt=pulse.ckpt,
            snapshots=pulse.snapshots,
        )

    def on_pulse_closed(self, event: io.PulseClosed) -> None:
        pulse = self.liveness.pulses.get(event.replica)
        if pulse is not None:
            pulse.connected = False

    def on_written(self, event: io.RecordWritten) -> None:
        if self.writing is not None and self.writing.nonce == event.nonce:
            self._adopt(self.writing)

    def on_write_failed(self, event: io.WriteFailed) -> None:
        """Rule 1: an indefinite write is re-read; so is a refused one, which tells who wrote instead."""
        if self.writing is not None and self.writing.nonce == event.nonce:
            self.reading = True
            self._do(io.ReadRecord())

    def on_read(self, event: io.RecordRead) -> None:
        if not self.reading:
            return
        self.reading = False
        written, self.writing = self.writing, None
        found = event.record
        if written is not None and found is not None and found.nonce == written.nonce:
            self._adopt(found)
        elif (found.nonce if found else "") != (self.record.nonce if self.record else ""):
            self.leading = False
            self._do(io.StepDown("another lighthouse has written the job's record"))

    def on_operator(self, event: io.Operator) -> None:
        if event.action == "drain":
            self.draining[event.replica] = f"drained by {event.who} ({event.why})"
        elif self._lists(event.replica) and self._is_spared_by(event.replica):
            self._condemn(event.replica, f"evicted by {event.who}: {event.why}")
        else:
            self._tell("not evicted", event.replica, "nobody else in the roster knows the job's state")

    def _is_spared_by(self, replica: str) -> bool:
        """Whether the job goes on without this one: somebody else knows its state."""
        assert self.record is not None
        others = [x for x in self.record.roster if x.replica not in (replica, *self.epoch.condemned)]
        return any(self._knows(x) for x in others)

    def on_tick(self, _: io.Tick) -> None:
        pass

    # --- messages ----------------------------------------------------------------------------------

    def on_beat(self, peer: Peer, beat: m.Beat) -> None:
        if peer.beat is not None and beat.step > peer.beat.step and self._in_force(peer):
            self.reforms = Reforms()
        peer.beat = beat
        self._send(peer.session.replica, m.BeatReply(beat.number))

    def on_running(self, peer: Peer, message: m.Running) -> None:
        if self._is_mine(message.fence):
            self.epoch.running.setdefault(peer.session.replica, message.step)

    def on_aborted(self, peer: Peer, message: m.Aborted) -> None:
        """An abort in any epoch since the last forced one ends only with the next forced one: a planned epoch
        helps nobody who waits in the one before it. A leaving member's abort holds the others up too."""
        name = peer.session.replica
        if name in self.epoch.aborted or not self._is_recent(message.fence):
            return
        if not self.epoch.aborted:
            self.epoch.aborted_at = self._now
        self.epoch.aborted[name] = message
        self._tell("aborted", name, message.why)

    def on_report(self, peer: Peer, message: m.Report) -> None:
        if not self._is_mine(message.fence) or not self._in_force(peer):
            return
        self.epoch.reports.setdefault(peer.session.replica, message)
        if self.epoch.decision is not None:
            self._send(peer.session.replica, self.epoch.decision)

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

    def on_finished(self, peer: Peer, message: m.Finished) -> None:
        if self.record is not None and message.fence.generation == self.record.generation:
            self.finished[peer.session.replica] = message.step

    def on_fallen(self, peer: Peer, message: m.Fallen) -> None:
        if self._in_force(peer) and self._is_recent(message.fence):
            self.epoch.fallen.add(peer.session.replica)
            self._condemn(peer.session.replica, f"it cannot go on: {message.why}")

    # --- what is due -------------------------------------------------------------------------------

    def _plan(self) -> None:
        record = self.record
        if record is None:
            self._start(None)
            return
        if record.complete:
            return
        if self._complete(record) or self._evict(record) or self._reform(record):
            return
        if record.is_forced and self.epoch.decision is None:
            self._decide(record)
        if self._is_settled(record):
            moved = self._drain(record) or self._admit(record)
            if not moved:
                self._serve(record)

    def _complete(self, record: Record) -> bool:
        left = [x for x in record.roster if not x.leaving]
        if not left or any(x.replica not in self.finished for x in left):
            return False
        self._write_complete(record, max(self.finished[x.replica] for x in left))
        return True

    def _write_complete(self, record: Record, step: int) -> None:
        base = replace(record.base, step=step)
        self._write(replace(record, complete=True, base=base, reason=f"finished at step {step}"))

    def _evict(self, record: Record) -> bool:
        """Rule 2, and the wait for a cold start when nobody who knows the job's state is left."""
        for member in record.roster:
            if member.replica not in self.epoch.condemned:
                verdict = self.liveness.verdict(member, self._now)
                if verdict:
                    self._condemn(member.replica, verdict)
        condemned = self.epoch.condemned
        if not any(self._knows(x) for x in record.roster if x.replica not in condemned):
            self._pardon(record)
        if not condemned:
            return False
        left = tuple(x for x in record.roster if x.replica not in condemned)
        if not any(self._knows(x) for x in left):
            return self._start_again(record)
        if self._now - self.epoch.condemned_at < self.config.coalesce_s:
            return True
        why = "; ".join(f"{name} evicted: {reason}" for name, reason in sorted(condemned.items()))
        self._write_epoch(record, left, forced=True, why=why)
        return True

    def _pardon(self, record: Record) -> None:
        """Nobody could take over: whoever is heard, and was not found wrong or fallen, goes on."""
        for member in record.roster:
            if member.replica not in self.epoch.condemned or member.replica in self.epoch.fallen:
                continue
            if not self.liveness.verdict(member, self._now):
                del self.epoch.condemned[member.replica]
                self._tell("heard again", member.replica, "it goes on, for nobody could take over")

    def _condemn(self, replica: str, reason: str) -> None:
        if replica in self.epoch.condemned or not self._lists(replica):
            return
        if not self.epoch.condemned:
            self.epoch.condemned_at = self._now
        self.epoch.condemned[replica] = reason
        self._tell("condemned", replica, reason)

    def _reform(self, record: Record) -> bool:
        """Rule 3: every abort leads to a new epoch. The ring order moves on, so that a bad link is left
        out; a member that most others cannot reach is evicted after the third try."""
        epoch = self.epoch
        if not epoch.aborted or self._now - epoch.aborted_at < self._reform_delay():
            return False
        self.reforms.tries += 1
        self.reforms.blame.update(a.about for a in epoch.aborted.values() if self._lists(a.about))
        if self.reforms.tries > 3 and self.reforms.blame:
            most = max(self.reforms.blame.values())
            worst = [x.replica for x in record.roster if self.reforms.blame[x.replica] == most][-1]
            if self._is_spared_by(worst):
                self._condemn(worst, f"peers could not reach it {most} times")
                self.reforms = Reforms()
                return True
        roster = record.roster[1:] + record.roster[:1] if len(record.roster) > 2 else record.roster
        why = "; ".join(f"{name}: {a.why}" for name, a in sorted(epoch.aborted.items()))
        self._write_epoch(record, roster, forced=True, why=f"formed again ({why})")
        return True

    def _reform_delay(self) -> float:
        return float(min(self.config.reform_s * 2**self.reforms.tries, self.config.reform_limit_s))

    def _decide(self, record: Record) -> None:
        """Rule 5."""
        reports = self.epoch.reports
        if any(x.replica not in reports for x in record.roster):
            return
        decision = decide(record, reports, self._micro_batches())
        if isinstance(decision, Evict):
            for name in decision.replicas:
                self.epoch.fallen.add(name)
                self._condemn(name, decision.reason)
            self._evict(record)
        elif isinstance(decision, Undecidable):
            self._tell("stopped", "", decision.reason)
            for member in record.roster:
                self._send(member.replica, m.Rejected(decision.reason))
        else:
            self.epoch.decision = decision
            self._tell("resume", "", f"step {decision.step}: {decision.reason}")
            for member in record.roster:
                self._send(member.replica, decision)

    def _is_settled(self, record: Record) -> bool:
        """Rule 4: every member runs in the current epoch, and nothing is outstanding."""
        if self.epoch.aborted or (record.is_forced and self.epoch.decision is None):
            return False
        return all(x.replica in self.epoch.running for x in record.roster) or self._is_parked(record)

    def _is_parked(self, record: Record) -> bool:
        decided = not record.is_forced or self.epoch.decision is not None
        return decided and len(record.roster) < self.config.policy.min_replicas

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

    def _admit(self, record: Record) -> bool:
        ready = [p for p in self.liveness.peers.values() if self._may_join(record, p)]
        room = self.config.policy.max_replicas - len(record.roster)
        if not ready or room <= 0:
            return False
        ready = sorted(ready, key=lambda p: p.session.replica)[:room]
        newcomers = tuple(replace(_as_member(p.session), fresh=True) for p in ready)
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

    def _doubt(self, peer: Peer) -> str:
        """Why this process would be evicted at once if it were in a roster, or empty."""
        return self.liveness.verdict(_as_member(peer.session), self._now)

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

    # --- starting ----------------------------------------------------------------------------------

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
                roster=tuple(_as_member(p.session) for p in peers),
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

    # --- shared moves ------------------------------------------------------------------------------

    def _write_epoch(self, record: Record, roster: tuple[Member, ...], forced: bool, why: str) -> None:
        epoch = record.epoch + 1
        proven = tuple(replace(x, fresh=not self._knows(x), ckpt=self._ckpt(x)) for x in roster)
        self._write(
            replace(
                record,
                epoch=epoch,
                forced=epoch if forced else record.forced,
                nonce=self._nonce(),
                roster=proven,
                reason=why,
            )
        )

    def _ckpt(self, member: Member) -> str:
        """Where its checkpoint server is now: one that died was started again at another address."""
        pulse = self.liveness.pulses.get(member.replica)
        known = pulse is not None and pulse.incarnation == member.incarnation and bool(pulse.ckpt)
        return pulse.ckpt if known and pulse is not None else member.ckpt

    def _knows(self, member: Member) -> bool:
        """Whether it knows every step that may be committed: it is not fresh, or has entered a round of
        this epoch with its own state there, so that nothing is committed without it from then on."""
        if not member.fresh:
            return True
        entered, peer = self.epoch.running.get(member.replica), self.liveness.peers.get(member.replica)
        if entered is None or peer is None or peer.incarnation != member.incarnation:
            return False
        return peer.step >= entered >= 0 and self._is_of_generation(peer)

    def _write(self, record: Record) -> None:
        if self.record is not None and record.nonce == self.record.nonce:
            record = replace(record, nonce=self._nonce())
        self.writing = record
        self._do(io.WriteRecord(record, self.record))

    def _adopt(self, record: Record) -> None:
        """The store has committed it: now, and only now, it is announced."""
        if self.record is not None and self.record.generation != record.generation:
            self.finished.clear()
        self._note_setbacks(record)
        self.record, self.writing = record, None
        self.epoch = EpochState()
        for serving in self.serving.values():
            if not serving.told:
                serving.asked.clear()
        self._tell("complete" if record.complete else "epoch", "", record.reason)
        self._announce(record)

    def _note_setbacks(self, record: Record) -> None:
        """Who is evicted waits before it is admitted again, longer every time: its return stops nobody,
        but its next eviction would."""
        for member in self.record.roster if self.record is not None else ():
            if record.lists(member.replica, member.incarnation) or member.leaving:
                continue
            key = (member.replica, member.incarnation)
            times = self.setbacks.get(key, Setback()).times + 1
            wait_s = min(READMIT_S * 2 ** (times - 1), READMIT_LIMIT_S)
            self.setbacks[key] = Setback(times, self._now + wait_s)

    def _announce(self, record: Record) -> None:
        for replica in self.liveness.peers:
            self._send(replica, m.Epoch(record))
            if record.complete:
                self._send(replica, m.Complete(record.fence, record.base.step))

    def _send(self, replica: str, message: m.LeaderMessage) -> None:
        peer = self.liveness.peers.get(replica)
        if peer is not None and peer.connected:
            self._do(io.SendMember(replica, peer.incarnation, message))

    def _tell(self, kind: str, about: str, why: str) -> None:
        self._do(io.Tell(kind, self.record.epoch if self.record else 0, about, why))

    def _do(self, effect: io.Effect) -> None:
        self._effects.append(effect)

    def _nonce(self) -> str:
        return f"{self.entropy.getrandbits(64):016x}"

    def _lists(self, replica: str) -> bool:
        return self.record is not None and self.record.member(replica) is not None

    def _in_force(self, peer: Peer) -> bool:
        record = self.record
        return record is not None and record.lists(peer.session.replica, peer.incarnation)

    def _is_mine(self, fence: object) -> bool:
        return self.record is not None and fence == self.record.fence

    def _is_of_generation(self, peer: Peer) -> bool:
        return self.record is not None and peer.generation == self.record.generation

    def _is_recent(self, fence: Fence) -> bool:
        """Whether no forced epoch came since: what a member says of itself there still holds."""
        record = self.record
        if record is None or fence.generation != record.generation:
            return False
        return record.forced <= fence.epoch <= record.epoch

    def _top_step(self, record: Record) -> int:
        steps = [
            p.step
            for p in self.liveness.peers.values()
            if p.generation == record.generation and self._in_force(p)
        ]
        return max(steps, default=record.base.step)

    def _micro_batches(self) -> int:
        return next(iter(self.liveness.peers.values())).session.micro_batches


@dataclass(frozen=True, slots=True)
class Setback:
    """How often a process was evicted, and from when on it may be admitted again."""

    times: int = 0
    until: float = 0.0


@dataclass(slots=True)
class Reforms:
    """Tries to form again without a committed step between them, and who was blamed."""

    tries: int = 0
    blame: Counter[str] = field(default_factory=Counter)


def _as_member(session: m.Session) -> Member:
    return Member(
        replica=session.replica,
        incarnation=session.incarnation,
        link=session.link,
        ckpt=session.ckpt,
        shares=session.shares,
        layout=session.layout,
    )


def _difference(a: m.Session, b: m.Session) -> str:
    if a.layout != b.layout:
        return "parameters (names, shapes or dtypes)"
    if (a.micro_batches, a.data) != (b.micro_batches, b.data):
        return "data settings"
    return ""


def _names(members: list[Member]) -> str:
    return ", ".join(x.replica for x in members)


_HANDLERS: dict[type, Callable[[Leader, Any], None]] = {
    io.Elected: Leader.on_elected,
    io.SessionOpened: Leader.on_opened,
    io.SessionClosed: Leader.on_closed,
    io.FromMember: Leader.on_member,
    io.PulseSeen: Leader.on_pulse,
    io.PulseClosed: Leader.on_pulse_closed,
    io.RecordWritten: Leader.on_written,
    io.RecordRead: Leader.on_read,
    io.WriteFailed: Leader.on_write_failed,
    io.Operator: Leader.on_operator,
    io.Tick: Leader.on_tick,
}

_FROM_MEMBER: dict[type, Callable[[Leader, Peer, Any], None]] = {
    m.Beat: Leader.on_beat,
    m.Running: Leader.on_running,
    m.Aborted: Leader.on_aborted,
    m.Report: Leader.on_report,
    m.NeedState: Leader.on_need_state,
    m.Taken: Leader.on_taken,
    m.Missed: Leader.on_missed,
    m.Finished: Leader.on_finished,
    m.Fallen: Leader.on_fallen,
}
