"""The choice of the state that a generation begins from."""

from dataclasses import dataclass, field

from fabric.model import DURABLE, Base, Record, SnapshotRef
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.leader.state import JobState
from fabric.protocol.messages import network as m


@dataclass(slots=True, eq=False)
class BaseChoice:
    """Rule 6: knows where each state is held, and which states proved to be of no use."""

    state: JobState
    unusable: dict[SnapshotRef, str] = field(default_factory=dict)  # snapshot -> why no member could load it
    mistrusted: dict[SnapshotRef, str] = field(default_factory=dict)  # snapshot -> why its state is wrong
    silent_servers: set[str] = field(default_factory=set)  # unconnected servers that delivered no state
    base_loaded_generation: int = 0  # the newest generation whose base a member has loaded
    steps_lost: int | None = None  # number of steps that the newest cold start lost; None: not known

    def choose(self, peers: list[Peer]) -> tuple[Base | None, str]:
        """The state with the highest (generation, step); of equal ones memory comes before durable storage.

        Pass over states that members could not load before or called wrong. Return None when no other state
        is left. The text names the states that were passed over.
        """
        states = self.held_states(peers)
        for ref in self.state.liveness.durable():
            states.setdefault(ref, set()).add(DURABLE)
        passed = {ref: f"could not be loaded: {why}" for ref, why in self.unusable.items()}
        passed |= {ref: f"is not trusted: {why}" for ref, why in self.mistrusted.items() if ref in states}
        newest_first = sorted(passed, key=lambda ref: (-ref.generation, -ref.step))
        skipped = "; ".join(f"step {x.step} of generation {x.generation} {passed[x]}" for x in newest_first)
        usable = {ref: urls for ref, urls in states.items() if ref not in passed}
        if any(ref.generation for ref in self.unusable):
            # The job has committed steps, so the initial state of new processes cannot replace its state.
            usable = {ref: urls for ref, urls in usable.items() if ref.generation}
        if states and not usable:
            return None, skipped
        if not usable:  # no server holds a state: begin from the newest state that a trainer has said it has
            newest = max(peers, key=lambda p: (_own_state(p).generation, _own_state(p).step))
            own, urls = _own_state(newest), tuple(a.ckpt for a in as_member(newest.session).addresses)
            return Base(own.generation, own.step, own.digest, urls), skipped
        best = max(usable, key=lambda ref: (ref.generation, ref.step, len(usable[ref]), ref.digest))
        return Base(best.generation, best.step, best.digest, tuple(sorted(usable[best]))), skipped

    def held_states(self, peers: list[Peer]) -> dict[SnapshotRef, set[str]]:
        """The complete states in checkpoint servers' memory, each with the URLs of those servers.

        The server's status says what it holds. If no status arrives, its trainer's session counts.
        """
        states = self.state.liveness.servers.whole(1 + len(peers[0].session.ranks))
        heard = self.state.liveness.servers.heard_urls()
        for peer in self.state.liveness.peers.values():
            urls = {a.ckpt for a in as_member(peer.session).addresses}
            if not peer.connected or urls & heard or urls & self.silent_servers:
                continue
            for ref in peer.session.snapshots:
                states.setdefault(ref, set()).update(urls)
        return states

    def mistrust(self, names: tuple[str, ...], why: str) -> None:
        """Mistrust each state that only the servers of these members, whose states are wrong, hold."""
        record, held = self.state.record, self.state.liveness.servers.held()
        wrong = [x for x in record.roster if x.replica in names] if record is not None else []
        urls = {url for member in wrong for url in self.state.liveness.servers.urls_of(member)}
        earlier = {ref: text for ref, text in self.mistrusted.items() if ref in held}
        self.mistrusted = {**earlier, **{ref: why for ref, where in held.items() if where <= urls}}

    def forgive(self) -> None:
        """Let every state be tried again, because an operator restarts the job."""
        self.unusable.clear()
        self.mistrusted.clear()

    def note_cannot_load(self, message: m.CannotContinue, record: Record) -> None:
        """Note that a member could not load the base, and which of its sources are not heard."""
        if message.unusable and self.base_loaded_generation != record.generation:
            self.unusable.setdefault(base_ref(record), message.why)
        self.silent_servers.update(set(record.base.sources) - self.state.liveness.servers.heard_urls())

    def note_loaded(self, generation: int) -> None:
        """Note that a member has loaded this generation's base, so others can load it too."""
        record = self.state.record
        if (
            record is not None
            and generation == record.generation
            and self.base_loaded_generation != generation
        ):
            self.base_loaded_generation = generation
            self.unusable.pop(base_ref(record), None)


def _own_state(peer: Peer) -> SnapshotRef:
    """The state that this trainer last said it has.

    A trainer goes on with its last roster after it has opened its session, until it gets a record. Then its
    heartbeats name no generation.
    """
    session, beat = peer.session, peer.beat
    if beat is None or not beat.digest:
        return SnapshotRef(session.generation, session.step, session.digest)
    return SnapshotRef(max(session.generation, beat.generation), beat.step, beat.digest)


def base_ref(record: Record) -> SnapshotRef:
    """The state that the record's generation begins from."""
    return SnapshotRef(record.base.generation, record.base.step, record.base.digest)
