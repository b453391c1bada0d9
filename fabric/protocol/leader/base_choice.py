"""The choice of the state that a generation begins from."""

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

from fabric.model import DURABLE, Base, Record, SnapshotRef
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.leader.state import JobState
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import rank_of_url

States = dict[SnapshotRef, set[str]]  # a state -> the URLs of the servers that hold it, or ``DURABLE``


class BaseChoice(Struct, eq=False):
    """Rule 6: knows where each state is held, and which states proved to be of no use."""

    state: JobState
    unusable: dict[SnapshotRef, str] = field(default_factory=dict)  # snapshot -> why no member could load it
    mistrusted: dict[SnapshotRef, str] = field(default_factory=dict)  # snapshot -> why its state is wrong
    silent_servers: set[str] = field(default_factory=set)  # unconnected servers that delivered no state
    base_loaded_generation: int = 0  # the newest generation whose base a member has loaded

    def choose(self, peers: list[Peer], is_heard: bool = False) -> tuple[Base | None, str]:
        """The state with the highest (generation, step); of equal ones memory comes before durable storage.

        Pass over states that members could not load before or called wrong, and those that holders dispute.
        Pass over the checkpoints of another job. Return None when no other state is left. The text names the
        states that were passed over. ``is_heard``: this leader has heard members of the record's generation.
        """
        states = self.held_states(peers)
        for ref in self.state.liveness.durable():
            states.setdefault(ref, set()).add(DURABLE)
        foreign = self._foreign(states, is_heard)
        passed = {ref: f"could not be loaded: {why}" for ref, why in self.unusable.items()}
        disputed = self._disputed(states, peers)
        passed |= disputed | foreign
        passed |= {ref: f"is not trusted: {why}" for ref, why in self.mistrusted.items() if ref in states}
        newest_first = sorted(passed, key=lambda ref: (-ref.generation, -ref.step))
        texts = (f"step {x.step} of generation {x.generation} {passed[x]}" for x in newest_first)
        skipped = "; ".join(dict.fromkeys(texts))
        usable = {ref: urls for ref, urls in states.items() if ref not in passed}
        if any(ref.generation for ref in (*self.unusable, *disputed)):
            # The job has committed steps, so the initial state of new processes cannot replace its state.
            usable = {ref: urls for ref, urls in usable.items() if ref.generation}
        if any(ref not in foreign for ref in states) and not usable:
            return None, skipped
        if not usable:  # no server holds a state: begin from the newest state that a trainer has said it has
            newest = max(peers, key=lambda p: (_own_state(p).generation, _own_state(p).step))
            own, urls = _own_state(newest), tuple(a.ckpt for a in as_member(newest.session).addresses)
            return Base(own.generation, own.step, own.digest, urls), skipped
        worth = {
            ref: (ref.generation, ref.step, urls != {DURABLE}, len(urls), ref.digest)
            for ref, urls in usable.items()
        }
        best = max(usable, key=lambda ref: worth[ref])
        return Base(best.generation, best.step, best.digest, tuple(sorted(usable[best]))), skipped

    def _foreign(self, states: States, is_heard: bool) -> dict[SnapshotRef, str]:
        """The checkpoints of a generation that this job has not reached -> why they are passed over.

        An older copy of the store knows too low a generation, so a member or a state in memory must show it.
        """
        record, peers = self.state.record, self.state.liveness.peers.values()
        if record is None:
            return {}
        newest = max([record.generation, *(max(p.generation, p.session.known_generation) for p in peers)])
        in_memory = {ref.generation for ref, urls in states.items() if urls != {DURABLE}}
        if not is_heard and newest not in in_memory:
            return {}
        why = f"is of another job, because this one has reached only generation {newest}"
        return {ref: why for ref, urls in states.items() if ref.generation > newest and urls == {DURABLE}}

    def _disputed(self, states: States, peers: Sequence[Peer]) -> dict[SnapshotRef, str]:
        """The states that cannot be believed -> why.

        Holders of one layout hold unequal states of one step, so a state is wrong. The states of most holders
        are believed. A wrong state spoils the later states of its holders. Generation 0 has no equal states.
        """
        if all(not p.session.replay for p in peers):
            return {}  # their settings expect no equal states
        live, record = self.state.liveness, self.state.record
        members = [as_member(p.session) for p in live.peers.values()]
        members += record.roster if record is not None else ()
        cuts = {url: x.cuts for x in members for url in (*live.servers.urls_of(x), x.ckpt)}
        holders: dict[tuple[int, int, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for ref, urls in states.items():
            for url in (u for u in urls if ref.generation and _is_first_rank(u)):
                layout = url if url == DURABLE else cuts.get(url, "")
                holders[ref.generation, ref.step, layout][ref.digest].add(url)
        disputed: dict[SnapshotRef, str] = {}
        for (generation, step, layout), by_digest in holders.items():
            if len(by_digest) == 1 or (layout == DURABLE and any(cuts.values())):
                continue
            sides = by_digest.values()
            wrong = {url for side in sides if 2 * len(side) <= sum(map(len, sides)) for url in side}
            if all(side <= wrong for side in sides):
                wrong.add(DURABLE)
            why = f"is disputed: there are unequal states of step {step}"
            for later in (x for x in states if x.generation == generation and x.step >= step):
                # A copy in storage counts only alone.
                memory = {url for url in states[later] if _is_first_rank(url)} - {DURABLE}
                if memory <= wrong if memory else DURABLE in wrong:
                    disputed[later] = why
        return disputed

    def held_states(self, peers: list[Peer]) -> States:
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
        """Let every state be tried again, because an operator restarts the job.

        The processes that are there have read storage since, so what gone ones found there does not count.
        """
        self.unusable.clear()
        self.mistrusted.clear()
        self.state.liveness.forget_storage()

    def note_cannot_load(self, message: m.CannotContinue, record: Record) -> None:
        """Note that a member could not load the base, and which of its sources are not heard."""
        if message.unusable and self.base_loaded_generation != record.generation:
            self.unusable.setdefault(base_ref(record), message.why)
        self.silent_servers.update(set(record.base.sources) - self.state.liveness.servers.heard_urls())

    def note_loaded(self, generation: int) -> None:
        """Note that a member has loaded this generation's base, so others can load it too."""
        record, is_news = self.state.record, self.base_loaded_generation != generation
        if record is not None and generation == record.generation and is_news:
            self.base_loaded_generation = generation
            self.unusable.pop(base_ref(record), None)


def _is_first_rank(url: str) -> bool:
    return url == DURABLE or not rank_of_url(url)


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
