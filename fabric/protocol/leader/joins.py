"""How replicas come into a job and leave it: first and cold start, state for a newcomer, admission, drain."""

from collections import Counter
from dataclasses import replace

from fabric.model import DURABLE, Base, Member, Record, SnapshotRef, counted, incident_id_of
from fabric.protocol.leader.base import GAP_STEPS, SERVE_AGAIN_S, Serving, base_ref
from fabric.protocol.leader.failures import Failures
from fabric.protocol.leader.liveness import Peer, PulseState, as_member
from fabric.protocol.messages import network as m
from fabric.protocol.rules.assignment import seated

# Seconds that a job which has already run waits for the rest of its replicas before it begins again.
COLD_WAIT_S = 5.0


class Joins(Failures):
    """A leader that starts jobs and lets replicas in and out."""

    # --- serving newcomers -----------------------------------------------------------------------------

    def on_need_state(self, peer: Peer, message: m.RequestState) -> None:
        """A newcomer that falls off starts again from a newer snapshot once; then the others wait for it."""
        if self._in_force(peer):
            return
        name = peer.session.replica
        old = self.serving.get(name, Serving())
        cut = self.record is not None and bool(self._out_of_reach(self.record, peer))
        serving = self.serving[name] = Serving(tries=old.tries if message.lost and not cut else 0)
        self._record_event("needs state", name, message.why)
        if not peer.session.replay:
            serving.blocking_reason = "its settings turn replay off"
        elif serving.tries > 1:
            serving.blocking_reason = f"it fell off twice: {message.why}"

    def on_taken(self, peer: Peer, message: m.SnapshotTaken) -> None:
        serving = self.serving.get(message.joiner)
        if serving is not None and serving.step == message.step:
            serving.taken[peer.session.replica] = message.digest

    def on_missed(self, peer: Peer, message: m.SnapshotMissed) -> None:
        serving = self.serving.get(message.joiner)
        if serving is not None and serving.step == message.step:
            serving.missed.add(peer.session.replica)

    def _serve(self, record: Record) -> None:
        """Catch-up: have the members snapshot at a step to come, and tell the newcomer who did."""
        if not self.serving:
            return
        names = {x.replica for x in record.roster}
        for joiner, serving in list(self.serving.items()):
            peer, member = self.liveness.peers.get(joiner), record.member(joiner)
            inside = peer is not None and member is not None and peer.incarnation == member.incarnation
            caught_up = inside and member is not None and self._knows(member)
            if peer is None or not peer.connected or caught_up:
                del self.serving[joiner]
                self._end_serving(joiner)
            elif inside or serving.blocking_reason or self._is_penalised(record, peer):
                continue
            elif self._out_of_reach(record, peer):
                continue  # what the members would keep for it does not get to it
            elif serving.has_sources:
                self._watch_gap(record, peer, serving)
            else:
                answered = (serving.asked & names) <= (set(serving.taken) | serving.missed)
                late = self._now - serving.asked_at >= SERVE_AGAIN_S
                if serving.asked and answered and serving.taken:
                    self._send_sources(record, joiner, serving)
                elif not serving.asked or (answered and late):
                    step = self.top_step() + (0 if self._is_parked(record) else 1)
                    self._ask_to_serve(record, joiner, step)

    def _watch_gap(self, record: Record, peer: Peer, serving: Serving) -> None:
        """Replay that does not gain on the job leads nowhere, however long it lasts."""
        if not self._is_of_generation(peer):
            return
        top = self.top_step()
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
        self._record_event("too slow", name, why)

    def _ask_to_serve(self, record: Record, joiner: str, step: int) -> None:
        old = self.serving.get(joiner, Serving())
        names = {x.replica for x in record.roster if not x.blocking_join}
        self.serving[joiner] = Serving(
            step=step,
            epoch=record.epoch,
            tries=old.tries,
            again=old.again,
            asked=names,
            asked_at=self._now,
        )
        for name in sorted(names):
            self._send(name, m.TakeSnapshotFor(record.fence, joiner, step))

    def _serve_again(self, replica: str) -> None:
        """A session began anew: what was asked or told there may have been lost."""
        own = self.serving.get(replica)
        if own is not None and self._is_blocking_join(replica):
            own.has_sources = False
        for joiner, serving in self.serving.items():
            if replica in serving.asked and replica not in serving.taken and self.record is not None:
                self._send(replica, m.TakeSnapshotFor(self.record.fence, joiner, serving.step))

    def _send_sources(self, record: Record, joiner: str, serving: Serving) -> None:
        digest = Counter(serving.taken.values()).most_common(1)[0][0]
        holders = [self._addressed(x) for x in record.roster if serving.taken.get(x.replica) == digest]
        urls = tuple(a.ckpt for x in holders for a in x.addresses)
        serving.has_sources = True
        serving.tries += 1
        state = SnapshotRef(record.generation, serving.step, digest)
        self._record_event("serves", joiner, f"step {serving.step} from {len(holders)} replicas")
        self._send(joiner, m.StateSources(record.fence, state, urls, serving.again))

    # --- the fallback: the others wait for the last transfer ---------------------------------------------

    def _is_blocking_join(self, replica: str) -> bool:
        member = self.record.member(replica) if self.record is not None else None
        return member is not None and member.blocking_join

    def _blocking_joiners(self, record: Record) -> list[str]:
        """Those for whose state the others wait in the round that was decided."""
        if self.epoch.decision is None:
            return []
        return [x.replica for x in record.roster if x.blocking_join and x.replica not in self.epoch.running]

    def _evict_slow_joiners(self, record: Record) -> None:
        for name in self._blocking_joiners(record):
            limit_s = self._join_stall_s(name)
            if self._now - self.epoch.decided_at >= limit_s:
                self.epoch.slow_joiners.add(name)
                self._schedule_eviction(
                    name, f"the others waited {limit_s:g} s for its state, which did not arrive"
                )

    def _serve_blocking_joins(self, record: Record) -> None:
        """The members stand at the step that was decided: they snapshot it, and the newcomer fetches that."""
        for name in self._blocking_joiners(record):
            assert self.epoch.decision is not None
            serving = self.serving.get(name)
            if serving is None or serving.epoch != record.epoch:
                self._ask_to_serve(record, name, self.epoch.decision.step)
                continue
            answered = serving.asked <= (set(serving.taken) | serving.missed)
            if serving.has_sources or not answered:
                continue
            if serving.taken:
                self._send_sources(record, name, serving)
            elif self._now - serving.asked_at >= SERVE_AGAIN_S:
                self._ask_to_serve(record, name, self.epoch.decision.step)

    def _admit_blocking_join(self, record: Record) -> bool:
        """A newcomer that cannot catch up while the others step: they stop once, and wait for its state."""
        for name, serving in self.serving.items():
            peer = self.liveness.peers.get(name)
            if not serving.blocking_reason or peer is None or not self._is_welcome(record, peer):
                continue
            newcomer = replace(
                as_member(peer.session), joining=True, since=record.epoch + 1, blocking_join=True
            )
            why = (
                f"{name} joins while the others wait for its state, at most "
                f"{self._join_stall_s(name):g} s: {serving.blocking_reason}"
            )
            incident_id = self.loss_incidents.get(name, "")
            self._write_epoch(
                record, (*record.roster, newcomer), forced=True, why=why, incident_id=incident_id
            )
            return True
        return False

    def _end_serving(self, joiner: str) -> None:
        if self.record is not None:
            for member in self.record.roster:
                self._send(member.replica, m.StopServing(self.record.fence, joiner))

    # --- admitting and draining ------------------------------------------------------------------------

    def _admit(self, record: Record) -> bool:
        outside = record.strangers(self.liveness.peers.keys())
        room = self.most - len(record.roster)
        if room <= 0:
            return False
        near = self.top_step() - 1 if outside else 0
        ready = [p for p in map(self.liveness.peers.__getitem__, outside) if self._may_join(record, p, near)]
        if not ready:
            return self._admit_blocking_join(record)
        ready.sort(key=lambda p: p.session.replica)
        # Spares come last, and only as many as are missing.
        wanted = [p for p in ready if not self.stands_by(p)][:room]
        spares = [p for p in ready if self.stands_by(p)]
        ready = wanted + spares[: max(0, self.full - len(record.roster) - len(wanted))]
        since = record.epoch + 1
        newcomers = tuple(replace(as_member(p.session), joining=True, since=since) for p in ready)
        names = ", ".join(x.replica for x in newcomers)
        self._write_epoch(
            record,
            record.roster + newcomers,
            forced=self._is_parked(record),
            why=f"{names} joins",
            incident_id=next(
                (self.loss_incidents[x.replica] for x in newcomers if x.replica in self.loss_incidents), ""
            ),
        )
        return True

    def _may_join(self, record: Record, peer: Peer, near: int) -> bool:
        """``near``: the step that it must have come to."""
        if peer.generation != record.generation or peer.step < near:
            return False
        return self._is_welcome(record, peer)

    def _is_welcome(self, record: Record, peer: Peer) -> bool:
        if not peer.connected or peer.beat is None or self.kept_out(peer):
            return False
        if record.member(peer.session.replica) is not None or peer.session.replica in self.finished:
            return False
        if self._is_backing_off(peer):
            return False
        # Else it does not know yet that it is outside, or would be evicted at once.
        return peer.beat.epoch == record.epoch and not self._suspicion(peer)

    def _drain(self, record: Record) -> bool:
        self._drain_surplus(record)
        names = [x for x in record.roster if x.replica in self.draining] if self.draining else []
        leaving = [x for x in record.roster if x.leaving]
        self._dismiss(record)
        left = tuple(x for x in record.roster if not x.leaving)
        if leaving and any(self._knows(x) for x in left):
            self._write_epoch(record, left, False, f"{_names(leaving)} leaves")
            return True
        if not names or all(x.replica in self.draining for x in record.roster):
            return False
        roster = tuple(replace(x, leaving=x.leaving or x in names) for x in record.roster)
        whys = "; ".join(sorted({self.draining[x.replica] for x in names}))
        self._write_epoch(record, roster, False, f"{_names(names)} is being drained: {whys}")
        return True

    def _dismiss(self, record: Record) -> None:
        """Whoever is to leave and is outside already need not come back."""
        for name in [n for n in self.draining if record.member(n) is None]:
            reason = f"{name} is {self.draining[name]}: start it again when it is wanted"
            self._send(name, m.Rejected(reason))

    # --- states that can, and cannot, be loaded --------------------------------------------------------

    def on_cannot_continue(self, peer: Peer, message: m.CannotContinue) -> None:
        if self._in_force(peer) and self._is_recent(message.fence):
            if (
                message.unusable
                and self.record is not None
                and self.base_loaded_generation != self.record.generation
            ):
                self.unusable.setdefault(base_ref(self.record), message.why)
            # Who holds the base by its trainer's word alone, and delivers nothing, does not count any more.
            sources = self.record.base.sources if self.record is not None else ()
            self.silent_servers.update(set(sources) - self.liveness.heard_servers())
            self.epoch.cannot_continue.add(peer.session.replica)
            if self._is_blocking_join(peer.session.replica):
                self.epoch.slow_joiners.add(peer.session.replica)
            self.epoch.not_counted_as_failure.add(peer.session.replica)
            self._schedule_eviction(peer.session.replica, f"it cannot go on: {message.why}")

    def _mistrust(self, names: tuple[str, ...], why: str) -> None:
        """Of these members the state is wrong, and since when nobody knows: no generation begins from what
        their checkpoint servers alone have in memory."""
        record, held = self.record, self.liveness.held()
        wrong = [x for x in record.roster if x.replica in names] if record is not None else []
        urls = {url for member in wrong for url in self.liveness.ckpts(member)}
        known = {ref: text for ref, text in self.mistrusted.items() if ref in held}
        self.mistrusted = {**known, **{ref: why for ref, where in held.items() if where <= urls}}

    def _note_loaded(self, generation: int) -> None:
        """Whoever is in this generation could load what it began from, so that can be loaded."""
        record = self.record
        if (
            record is not None
            and generation == record.generation
            and self.base_loaded_generation != generation
        ):
            self.base_loaded_generation = generation
            self.unusable.pop(base_ref(record), None)

    def _record_durable(self, pulse: m.TrainerStatus, known: PulseState | None) -> None:
        if pulse.durable and (known is None or pulse.durable != known.durable):
            self._record_event(
                "durable", pulse.replica, f"the checkpoint of step {pulse.durable[-1].step} is complete"
            )
        if pulse.durable_error and (known is None or pulse.durable_error != known.durable_error):
            self._record_event("durable failed", pulse.replica, pulse.durable_error)

    # --- starting --------------------------------------------------------------------------------------

    def _start_again(self, record: Record) -> bool:
        """Rule 6: only when no member that may still be committing is merely out of sight. Who has caught
        up to the end of the job from outside has proved that nothing is left to do."""
        if self.finished:
            self._write_complete(record, max(self.finished.values()))
            return True
        limit = self.out_of_sight_s
        for member in record.roster:
            if not self._knows(member) or member.replica in self.epoch.cannot_continue:
                continue
            if self.liveness.proven_dead(member):
                continue
            if not self.liveness.out_of_contact(member, self._now, limit):
                return True
        self._start(record)
        return True

    def _start(self, record: Record | None) -> None:
        """Rule 6: a new generation from the newest state that anybody still holds."""
        open_ = self._startable()
        regular = [p for p in open_ if not p.session.spare]
        if not self._may_start(record, open_, regular):
            return
        if record is not None and record.failed:
            self._forgive_deaths()
        spares = [p for p in open_ if p.session.spare]
        peers = regular[: self.most] + spares[: max(0, self.full - len(regular))]
        base, passed = self._base(peers)
        if base is None:
            self.failure = (
                f"no state is left that could be loaded: {passed}; mend the storage, or name another "
                "FABRIC_DURABLE to begin from nothing"
            )
            return
        told = self._newest_of_another_store() if record is None else (record.generation, record.epoch)
        self.steps_lost = None if self.highest_step is None else max(0, self.highest_step - base.step)
        epoch = told[1] + 1
        sharing = peers[0].session.sharing
        starting = [replace(as_member(p.session), since=epoch) for p in peers]
        # Above the base's too: a durable checkpoint may be of a job whose record is gone.
        generation = max(told[0], base.generation) + 1
        self._write(
            Record(
                store_id=self.store_id,
                generation=generation,
                cold=epoch,
                epoch=epoch,
                forced=epoch,
                nonce=self._nonce(),
                roster=seated(starting, self.data_slots, sharing),
                base=base,
                reason=self._start_reason(record, base, passed),
                incident_id=incident_id_of(epoch),
                sharing=sharing,
                poison=self._known_poison(record) if record is not None else (),
                min_replicas=self.overrides.min_replicas,
            )
        )

    def _newest_of_another_store(self) -> tuple[int, int]:
        """The newest generation and epoch of the processes that are here although the store is empty: it was
        wiped or replaced while their job ran. What begins now is above both, for they know links, published
        gradients and states by these numbers. And the step that they had come to."""
        peers = [p for p in self.liveness.peers.values() if p.connected]
        generation = max((p.generation for p in peers), default=0)
        if generation:
            self.highest_step = max(p.step for p in peers if p.generation == generation)
        return generation, max((p.newest_epoch for p in peers), default=0)

    def _may_start(self, record: Record | None, open_: list[Peer], regular: list[Peer]) -> bool:
        """Whether those who are there begin now: they are enough, the rest had its time to come, and of a job
        that has run every checkpoint server that may hold its newest state has been heard."""
        if not open_ or len(open_) < self.least:
            self.waiting_since = None
            return False
        if self.waiting_since is None:
            self.waiting_since = self._now
        waited = self._now - self.waiting_since
        if len(regular) < self.config.policy.start_replicas and waited < self.start_wait_s:
            return False
        if record is not None and self.liveness.servers_to_hear(record.roster, self._now):
            return False
        self.waiting_since = None
        return True

    @property
    def start_wait_s(self) -> float:
        """How long a start waits for all its replicas. A job that has run goes on soon with those that are
        there, for the others join while it runs."""
        wait_s = self.config.policy.start_wait_s
        return wait_s if self.record is None else min(wait_s, COLD_WAIT_S)

    def startable(self) -> int:
        """How many could begin a generation now."""
        return len(self._startable())

    def _startable(self) -> list[Peer]:
        """Who could begin a generation; the penalised only where too few are left without them. The first one
        is begun with whoever has a session and of whom no kernel says otherwise: while thousands come, some
        are always silent for a while, and a job that waited until all of them are heard would not begin. Of
        those who begin again after a loss silence may be all that tells who is lost."""
        live, now = self.liveness, self._now
        there = [p for p in live.peers.values() if p.connected]
        suspects = live.suspects([p.session for p in there], now)
        if self.record is None:
            doubted = {x.replica for x in suspects if live.kernel_evidence(as_member(x), now)}
        else:
            doubted = {x.replica for x in suspects if live.suspicion(x, now)}
        found = [p for p in there if p.session.replica not in doubted]
        found.sort(key=lambda p: p.session.replica)
        if not self.penalties():
            return found
        good = [p for p in found if self._penalty_of(as_member(p.session)) is None]
        return good if len(good) >= self.least else found

    def _start_reason(self, record: Record | None, base: Base, passed: str) -> str:
        if record is None and base.generation == 0 and not self.steps_lost:
            return "first start"
        lost = (
            f", {counted(self.steps_lost, 'step')} lost with the memory that held them"
            if self.steps_lost
            else ""
        )
        if record is not None and self.steps_lost is None:
            lost = (
                ", and how many steps were lost is not known: this lighthouse was elected since, and heard "
                f"nobody of generation {record.generation}"
            )
        where = ", a durable checkpoint" if base.sources == (DURABLE,) else ""
        passed = f" ({passed})" if passed else ""
        return f"cold start from step {base.step} of generation {base.generation}{where}{lost}{passed}"

    def _base(self, peers: list[Peer]) -> tuple[Base | None, str]:
        """The ladder: the highest (generation, step) that anything still holds, memory before durable storage
        where both hold it, without what could not be loaded before, or is of a state that was found wrong.
        None when nothing else is left. And in words what was passed over."""
        found = self._held_states(peers)
        for ref in self.liveness.durable():
            found.setdefault(ref, set()).add(DURABLE)
        passed = {ref: f"could not be loaded: {why}" for ref, why in self.unusable.items()}
        passed |= {ref: f"is not trusted: {why}" for ref, why in self.mistrusted.items() if ref in found}
        newest_first = sorted(passed, key=lambda ref: (-ref.generation, -ref.step))
        told = "; ".join(f"step {x.step} of generation {x.generation} {passed[x]}" for x in newest_first)
        usable = {ref: urls for ref, urls in found.items() if ref not in passed}
        if any(ref.generation for ref in self.unusable):
            # The job has been further: the initial state of its new processes stands for none of that.
            usable = {ref: urls for ref, urls in usable.items() if ref.generation}
        if found and not usable:
            return None, told
        if not usable:
            first = peers[0].session
            urls = tuple(a.ckpt for a in as_member(first).addresses)
            return Base(first.generation, first.step, first.digest, urls), told
        best = max(usable, key=lambda ref: (ref.generation, ref.step, len(usable[ref]), ref.digest))
        return Base(best.generation, best.step, best.digest, tuple(sorted(usable[best]))), told

    def _held_states(self, peers: list[Peer]) -> dict[SnapshotRef, set[str]]:
        """What the checkpoint servers have in memory, every lane of it, and who has it: by their own word. Of
        a server that is not heard its trainer's word counts."""
        whole = self.liveness.whole(1 + len(peers[0].session.ranks))
        heard = self.liveness.heard_servers()
        for peer in self.liveness.peers.values():
            urls = {a.ckpt for a in as_member(peer.session).addresses}
            if not peer.connected or urls & heard or urls & self.silent_servers:
                continue
            # Its checkpoint server does not talk to me: what the trainer says of it may be out of date.
            for ref in peer.session.snapshots:
                whole.setdefault(ref, set()).update(urls)
        return whole


def _names(members: list[Member]) -> str:
    return ", ".join(x.replica for x in members)
