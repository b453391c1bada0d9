"""A trainer's links to the other members, as in the client: one control link per process, which outlives
epochs, and ring connections per epoch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from sim.network import TIMED_OUT, Connection, End, decode, encode
from sim.ring import RingLinks

from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.network import LARGE_BYTES, PeerMessage

if TYPE_CHECKING:
    from sim.trainer import Trainer

LINK_S = 2.0
DIAL_S = 0.5
PROBE_S = 0.5
Key = tuple[str, int]


@dataclass(slots=True)
class Linking:
    record: Record
    forward: RingLinks | None = None  # to the next member, once it has answered
    dialled: float = -10.0
    done: bool = False
    running: bool = False
    tries: int = 0


class Links:
    """The links of one trainer process."""

    linking_class = Linking

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.up: dict[Key, tuple[Connection, int]] = {}
        self.epochs: dict[int, Linking] = {}

    @property
    def key(self) -> Key:
        return self.trainer.host, self.trainer.incarnation

    def send(self, to: Key, message: PeerMessage) -> None:
        found = self.up.get(to)
        if found is not None:
            found[0].send(found[1], encode(message))

    def link_up(self, record: Record) -> None:
        linking = self.epochs.setdefault(record.epoch, self.linking_class(record))
        if linking.running:
            return
        linking.running = True
        linking.tries += 1
        tries = linking.tries
        self.trainer.after(LINK_S, lambda: self._give_up(linking, tries))
        self._dial(linking, 0)

    def switch(self, record: Record) -> None:
        for epoch in [e for e in self.epochs if e < record.epoch]:
            linking = self.epochs.pop(epoch)
            if not linking.done:
                self._drop(linking)
        self.trainer.ring.retire(record.epoch)

    def _drop(self, linking: Linking) -> None:
        """Close the ring connections that no ring has taken."""
        if linking.forward is not None and linking.forward.next is not None:
            linking.forward.next[0].close(linking.forward.next[1], "the epoch is over")

    # --- dialling ----------------------------------------------------------------------------------

    def _dial(self, linking: Linking, attempt: int) -> None:
        if not linking.running or self.epochs.get(linking.record.epoch) is not linking:
            return
        record, world = linking.record, self.trainer.world
        for other in record.roster:
            key = (other.replica, other.incarnation)
            there = world.trainer(key)
            if other.replica > self.trainer.host and key not in self.up and there is not None:
                self._connect(there)
        self._dial_next(linking)
        self.check()
        self.trainer.after((0.02, 0.05, 0.1, 0.2)[min(attempt, 3)], lambda: self._dial(linking, attempt + 1))

    def _dial_next(self, linking: Linking) -> None:
        """Dial one peer at a time, with a time limit, because the peer may be stopped or gone."""
        now, record = self.trainer.clockwork.now, linking.record
        following = self._neighbour(record, 1)
        there = self.trainer.world.trainer(following) if following is not None else None
        waits = now - linking.dialled < DIAL_S
        if there is None or linking.forward is not None or waits or not self._can_reach(there):
            return
        linking.dialled = now

        def established(links: RingLinks) -> None:
            if linking.forward is None and self.epochs.get(record.epoch) is linking:
                linking.forward = links
                self.check()
            elif links.next is not None:
                links.next[0].close(links.next[1], "not needed")

        self.trainer.ring.dial(record, there, established)

    def _can_reach(self, there: "Trainer") -> bool:
        return self.trainer.world.network.can_talk(self.trainer.host, there.host) and not there.paused

    def _connect(self, there: "Trainer") -> None:
        """Connect with a greeting, which takes a round trip through both processes."""
        here, network = self.trainer, self.trainer.world.network
        if not self._can_reach(there):
            return
        key, mine = (there.host, there.incarnation), self.key
        pending = here.pending_dials
        if key in pending:
            return
        pending[key] = None

        def dialled(connection: Connection) -> None:
            pending.pop(key, None)
            self.adopt(key, connection, 0)

        def accepted() -> None:
            if not network.can_talk(here.host, there.host) or not here.alive or key in self.up:
                return
            holder: list[Connection] = []
            near = End(here, here.host, lambda x: self.heard(key, x), lambda w: self.lost(key, holder[0], w))
            far = End(
                there,
                there.host,
                lambda x: there.links.heard(mine, x),
                lambda w: there.links.lost(mine, holder[0], w),
            )
            connection = Connection(network, near, far)
            holder.append(connection)
            there.links.adopt(mine, connection, 1)
            here.after(network.delay(), lambda: dialled(connection))

        there.after(network.delay(), accepted)
        here.world.clockwork.at(0.5, lambda: pending.pop(key, None))

    def adopt(self, key: Key, connection: Connection, side: int) -> None:
        if not connection.ends[side].open:
            return
        old = self.up.get(key)
        self.up[key] = (connection, side)
        if old is not None:
            # Messages on the old link may be lost, so the core gets the end of that link.
            why = "replaced by a newer link to the same process"
            old[0].close(old[1], why)
            self.trainer.feed(io.LinkLost(key[0], key[1], why))
        self.check()

    def check(self) -> None:
        """Feed Linked for every epoch whose links are all up."""
        for epoch in list(self.epochs):
            linking = self.epochs.get(epoch)
            if linking is None or not linking.running or self._missing(linking):
                continue
            linking.running = False
            if not linking.done and linking.record.lists(*self.key):
                linking.done = True
                self._install(linking)
            self.trainer.feed(io.Linked(epoch))

    def _install(self, linking: Linking) -> None:
        previous = self._neighbour(linking.record, -1)
        self.trainer.ring.install(linking.record, linking.forward, previous)

    def _missing(self, linking: Linking) -> list[str]:
        record = linking.record
        if not record.lists(*self.key):
            return []
        others = [(x.replica, x.incarnation) for x in record.roster if x.replica != self.trainer.host]
        missing = [key[0] for key in others if key not in self.up]
        return missing if linking.done else [*missing, *self._without_ring(linking)]

    def _without_ring(self, linking: Linking) -> list[str]:
        """The neighbours to which ring connections are missing."""
        record, missing = linking.record, list[str]()
        previous = self._neighbour(record, -1)
        if previous is not None and (record.epoch, previous) not in self.trainer.ring.arrivals:
            missing.append(previous[0])
        following = self._neighbour(record, 1)
        if following is not None and linking.forward is None:
            missing.append(following[0])
        return missing

    def _neighbour(self, record: Record, by: int) -> Key | None:
        if len(record.roster) < 2 or not record.lists(*self.key):
            return None
        other = record.roster[(record.names.index(self.trainer.host) + by) % len(record.roster)]
        return other.replica, other.incarnation

    def _give_up(self, linking: Linking, tries: int) -> None:
        if not linking.running or linking.tries != tries:
            return
        if self.epochs.get(linking.record.epoch) is not linking:
            return
        missing = self._missing(linking)
        linking.running = False
        self.trainer.clockwork.counts["links not made"] += 1
        why = f"no link to {', '.join(missing)}"
        away = tuple(self._unreachable(linking.record.roster, missing))
        about = missing[0] if missing else ""
        self.trainer.feed(io.LinkFailed(linking.record.epoch, about, why, away))

    # --- who can be reached ------------------------------------------------------------------------

    def probe(self, members: tuple[Member, ...]) -> None:
        """Probe each member by a large message to its host and back, with a time limit."""
        names, network = (
            [x.replica for x in members if x.replica != self.trainer.host],
            self.trainer.world.network,
        )

        def lost(names: list[str]) -> dict[str, bool]:
            """Return the names to which the probe fails, and whether small messages pass."""
            away, here = self._unreachable(members, names), self.trainer.host
            small = [n for n in names if n not in away and not network.can_carry(here, n)]
            return dict.fromkeys(away, False) | dict.fromkeys(small, True)

        missing = list(lost(names))
        delay = PROBE_S if missing else 2 * network.delay()

        def ended() -> None:
            found = lost(missing)
            self.trainer.feed(io.Probed(tuple(found), LARGE_BYTES if found and all(found.values()) else 0))

        self.trainer.after(delay, ended)

    def _unreachable(self, members: tuple[Member, ...], names: list[str]) -> list[str]:
        """Return those of ``names`` whose hosts are unreachable or no longer listen."""
        world, here = self.trainer.world, self.trainer.host
        there = {x.replica for x in members if world.trainer((x.replica, x.incarnation)) is not None}
        return [n for n in dict.fromkeys(names) if n not in there or not world.network.can_talk(here, n)]

    # --- hearing -----------------------------------------------------------------------------------

    def heard(self, key: Key, data: object) -> None:
        self.trainer.feed(io.FromPeer(key[0], key[1], cast(PeerMessage, decode(data))))

    def lost(self, key: Key, connection: Connection, why: str) -> None:
        found = self.up.get(key)
        if found is not None and found[0] is connection:
            del self.up[key]
            self.trainer.feed(io.LinkLost(key[0], key[1], why, silent=why == TIMED_OUT))
