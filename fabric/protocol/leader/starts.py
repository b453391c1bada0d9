"""How a job begins: the first time, and from a base after a loss."""

from msgspec import Struct
from msgspec.structs import replace

from fabric.model import DURABLE, Adaptation, Base, Record, counted, incident_id_of
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState, Mark, RosterLimits
from fabric.protocol.rules.assignment import seated

# Before a cold start the leader waits this many seconds for the replicas that are still missing.
COLD_WAIT_S = 5.0


class Starts(Struct, eq=False):
    """Rule 6: begins a generation when enough replicas are there."""

    state: JobState
    limits: RosterLimits
    evidence: FailureEvidence
    writer: RecordWriter
    bases: BaseChoice
    endings: Endings
    waiting_since: float | None = None
    steps_lost: int | None = None  # number of steps that the newest cold start lost; None: not known

    def start_again(self, record: Record) -> bool:
        """Start again once each member that knows the state is proven dead or out of contact for long enough.

        If a member, or a replica outside the roster that is there, reached the end of the job, the job is
        complete instead.
        """
        if ends := self.endings.known_ends(record):
            self.writer.write_complete(record, max(ends))
            return True
        limit = self.state.out_of_sight_s
        for member in record.roster:
            if not self.state.knows(member) or self.state.epoch.has(member.replica, Mark.USELESS):
                continue
            away = self.state.liveness.out_of_contact(member, self.state.now, limit)
            if not away and not self.state.liveness.proven_dead(member):
                return True
        self.start(record)
        return True

    def go_on_above(self, record: Record) -> bool:
        """Go on with the members that the sessions show, because the store was restored from an older copy.

        Members then know a newer epoch than the record, or another roster under the record's fence. They
        would drop the epoch that follows the record.
        """
        if record.failed or not self._is_older_copy(record):
            return False
        live, now = self.state.liveness, self.state.now
        there = [p for p in live.peers.values() if p.connected and p.session.known_generation]
        if now < live.grace_until or any(p.beat is None for p in there):
            return True
        generation, epoch = self.state.named_by_sessions
        inside = [p for p in there if p.beat is not None and not p.beat.is_outside]
        inside = [p for p in inside if p.generation == generation and not self.state.suspicion(p)]
        if not inside:
            return False
        if generation > record.generation:
            self.start(record)
            return True
        inside.sort(key=lambda p: p.session.replica)
        since = max(epoch, record.epoch) + 1
        roster = tuple(
            replace(record.member(p.session.replica) or as_member(p.session), joining=False, leaving=False)
            if record.lists(*p.process)
            else replace(as_member(p.session), since=since)
            for p in inside
        )
        why = f"the control store was restored from an older copy: its epoch {record.epoch} was over"
        self.writer.write_epoch(record, roster, forced=True, why=why)
        return True

    def _is_older_copy(self, record: Record) -> bool:
        """Whether a session names an epoch of this store that the record does not know."""
        peers = self.state.liveness.peers
        if self.state.named_by_sessions[1] > record.epoch:
            return True
        # Two rosters under one fence: an epoch was written again after the store lost it.
        return any(
            (p.session.store_id, p.session.known_generation, p.session.epoch)
            == (record.store_id, record.generation, record.epoch)
            and p.session.roster not in ("", record.roster_digest)
            for p in (peers.values() if not self.state.is_large else ())
            if p.connected and (p.beat is None or p.beat.epoch == record.epoch)
        )

    def start(self, record: Record | None) -> None:
        """Begin a generation from the newest state that any server holds."""
        open_ = self.candidates()
        if record is not None:
            self.limits.choose(open_)
        regular = [p for p in open_ if not p.session.spare]
        if not self._may_start(record, open_, regular):
            return
        if record is not None and record.failed:
            self.bases.forgive()
            self.evidence.forgive_deaths()
        spares = [p for p in open_ if p.session.spare]
        peers = regular[: self.limits.most] + spares[: max(0, self.limits.full - len(regular))]
        base, passed = self.bases.choose(peers, self.state.highest_step is not None)
        if base is None:
            self.endings.give_up(
                f"no state is left that could be loaded: {passed}; mend the storage, or name another "
                "FABRIC_DURABLE to begin from nothing"
            )
            return
        if record is None:
            newest = self.newest_of_another_store()
        else:
            generation, _ = self.state.named_by_sessions
            newest = (max(record.generation, generation), self.state.next_epoch(record) - 1)
        highest = self.state.highest_step
        self.steps_lost = None if highest is None else max(0, highest - base.step)
        epoch = newest[1] + 1
        sharing = peers[0].session.sharing
        starting = [replace(as_member(p.session), since=epoch) for p in peers]
        # Exceed the base's generation too: a durable checkpoint may belong to a job whose record is gone.
        before = max(newest[0], base.generation)
        self.writer.write(
            Record(
                store_id=self.state.store_id,
                generation=before + 1,
                cold=epoch,
                epoch=epoch,
                forced=epoch,
                nonce=self.writer.nonce(),
                roster=seated(starting, self.writer.data_slots, sharing),
                base=base,
                reason=self._start_reason(record, before, base, passed),
                incident_id=incident_id_of(epoch),
                sharing=sharing,
                poison=self.evidence.known_poison(record) if record is not None else (),
                min_replicas=self.limits.least_of_epoch,
                adaptation=record.adaptation.with_asked_shares if record is not None else Adaptation(),
            )
        )

    def _may_start(self, record: Record | None, open_: list[Peer], regular: list[Peer]) -> bool:
        """Whether the job begins now: enough replicas are there, and the time to wait for the others is over.

        If the job has run, the leader must have heard each checkpoint server that may hold its newest state.
        """
        if not open_ or len(open_) < self.limits.least:
            self.waiting_since = None
            return False
        if self.waiting_since is None:
            self.waiting_since = self.state.now
        waited = self.state.now - self.waiting_since
        if len(regular) < self.state.config.policy.start_replicas and waited < self.start_wait_s:
            return False
        if record is not None and self.state.liveness.servers_to_hear(record.roster, self.state.now):
            return False
        if record is None and self.awaited_own_state(open_) is not None:
            return False
        self.waiting_since = None
        return True

    def awaited_own_state(self, peers: list[Peer]) -> Peer | None:
        """The replica with the newest first state, if others need it, while no server says that it holds it.

        The leader waits for the grace period, because a trainer copies its state while it registers.
        """
        if not peers:
            return None
        live, newest = self.state.liveness, max(peers, key=lambda p: p.session.step)
        has_run = any(p.session.generation or p.session.known_generation for p in peers)
        if has_run or (not newest.session.step and len({p.session.digest for p in peers}) == 1):
            return None
        if live.durable() or self.state.now >= self.own_state_until(newest):
            return None
        held = self.bases.held_states(peers)
        return newest if all(ref.step < newest.session.step for ref in held) else None

    def own_state_until(self, peer: Peer) -> float:
        """Until when the start waits for this replica's own state."""
        return max(self.state.liveness.elected, peer.opened) + self.state.liveness.config.grace_s

    @property
    def start_wait_s(self) -> float:
        """How long a start waits for all replicas.

        A job that has run waits for a short time only, because later replicas can join while it runs.
        """
        wait_s = self.state.config.policy.start_wait_s
        return wait_s if self.state.record is None else min(wait_s, COLD_WAIT_S)

    def candidates(self) -> list[Peer]:
        """The replicas that could begin a generation: with penalties only if the other replicas are too few.

        A silent session counts for the first generation, because some of thousands are always silent for a
        while. It does not count for a later one, because silence may be the only sign of a death.
        """
        live, now = self.state.liveness, self.state.now
        there = [p for p in live.peers.values() if p.connected]
        suspects = live.suspects([p.session for p in there], now)
        if self.state.record is None:
            doubted = {x.replica for x in suspects if live.kernel_evidence(as_member(x), now)}
        else:
            doubted = {x.replica for x in suspects if live.suspicion(x, now)}
        peers = [p for p in there if p.session.replica not in doubted]
        peers.sort(key=lambda p: p.session.replica)
        if not self.evidence.penalties():
            return peers
        good = [p for p in peers if self.evidence.penalty_of(as_member(p.session)) is None]
        return good if len(good) >= self.limits.least else peers

    def _start_reason(self, record: Record | None, before: int, base: Base, passed: str) -> str:
        """Why a generation begins from ``base``; ``before``: the newest generation until now, 0: none."""
        if record is None and not before:
            return "first start"
        steps = self.steps_lost
        lost = f", {counted(steps, 'step')} lost with the memory that held them" if steps else ""
        if record is not None and steps is None:
            lost = (
                ", and how many steps were lost is not known: this lighthouse was elected since, and heard "
                f"no member of generation {record.generation}"
            )
        where = ", a durable checkpoint" if base.sources == (DURABLE,) else ""
        passed = f" ({passed})" if passed else ""
        return f"cold start from step {base.step} of generation {base.generation}{where}{lost}{passed}"

    def newest_of_another_store(self) -> tuple[int, int]:
        """The newest generation and epoch that the sessions have known although the store is empty.

        The store was wiped or replaced while their job ran. The next generation and epoch must be above both,
        because these numbers name links, published gradients and states. The processes' step counts too.
        """
        peers = [p for p in self.state.liveness.peers.values() if p.connected]
        generation = max((p.generation for p in peers), default=0)
        if generation:
            self.state.begin_generation(max(p.step for p in peers if p.generation == generation))
        # After a second loss of the store, the members' states may belong to no generation.
        generation = max([generation, *(p.session.known_generation for p in peers)])
        return generation, max((p.newest_epoch for p in peers), default=0)
