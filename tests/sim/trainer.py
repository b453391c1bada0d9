"""A trainer process: the real member core, and around it the client's shell in virtual time.

``Trainer`` is the control thread (events to the core, effects performed), ``MainThread`` the user's loop,
``Links`` the links, ``Exchange`` the data plane, ``Transfer`` the fetches.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sim.clockwork import Clockwork, Process
from sim.links import Links
from sim.main_thread import MainThread
from sim.network import Connection, End
from sim.server import Gradient, Server
from sim.transfer import Transfer

from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.member import Member
from fabric.protocol.member_state import Identity, State

if TYPE_CHECKING:
    from sim.world import World

ORDERS = (io.Compute, io.Apply, io.Install, io.TakeSnapshot, io.DropGradient, io.Finish, io.Stop)


def digest_of(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Exchange:
    """The data plane: a round ends at a member when the data of all members of its epoch has arrived."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.aborted: dict[int, None] = {}
        self.arrived: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        self.started: dict[tuple[int, int], io.StartExchange] = {}
        self.slots: dict[int, Gradient] = {}  # result buffers by step, as the client's slots

    def start(self, order: io.StartExchange) -> None:
        self.trainer.after(self.trainer.clockwork.between(0.0, 0.002), lambda: self._gather(order))

    def _gather(self, order: io.StartExchange) -> None:
        trainer, epoch = self.trainer, order.fence.epoch
        if epoch in self.aborted:
            self.fail(epoch, "", "this epoch's exchange was aborted")
            return
        key = (epoch, order.step)
        self.started[key] = order
        content = trainer.main.gradient if order.weight > 0 else ()
        trainer.world.checks.gathered(trainer, order, content)
        record = trainer.links.epochs[epoch].record
        for other in record.roster:
            there = trainer.world.trainer((other.replica, other.incarnation))
            if there is not None:
                self._send(there, key, content, 0)
        if not record.lists(trainer.host, trainer.incarnation):
            raise AssertionError(f"{trainer.name} started an exchange of {record}, which does not list it")

    def _send(self, there: "Trainer", key: tuple[int, int], content: tuple[int, ...], tries: int) -> None:
        """One ring's worth of chunks as one message; a partition holds it."""
        trainer = self.trainer
        if key[0] in self.aborted or not there.alive:
            return
        network = trainer.world.network
        if not network.can_talk(trainer.host, there.host) and there is not trainer:
            trainer.after(0.05, lambda: self._send(there, key, content, tries + 1))
            return
        delay = network.delay() + trainer.clockwork.between(0.0, 0.004)
        there.after(delay, lambda: there.exchange.arrive(trainer.host, key, content))

    def arrive(self, sender: str, key: tuple[int, int], content: tuple[int, ...]) -> None:
        if key[0] not in self.aborted:
            self.arrived.setdefault(key, {})[sender] = content
            self._finish(key)

    def _finish(self, key: tuple[int, int]) -> None:
        order, arrived = self.started.get(key), self.arrived.get(key, {})
        linking = self.trainer.links.epochs.get(key[0])
        if order is None or linking is None or any(n not in arrived for n in linking.record.names):
            return
        names = linking.record.names
        del self.started[key], self.arrived[key]
        parts = tuple((name, arrived[name]) for name in names)
        # Floating point is not associative: the order of the ring is part of the bits.
        gradient = Gradient(order.step, parts, digest_of(order.step, parts))
        self.slots.pop(order.step, None)
        self.slots[order.step] = gradient
        while len(self.slots) > 3:
            del self.slots[next(iter(self.slots))]  # the one that was used longest ago
        done = io.Exchanged(key[0], key[1], gradient.digest)
        self.trainer.after(self.trainer.clockwork.between(0.0, 0.001), lambda: self.trainer.feed(done))

    def abort(self, epoch: int) -> None:
        """My waits end, and my sockets of this epoch with them: the others notice."""
        if epoch in self.aborted:
            return
        self.fail(epoch, "", "aborted")
        self.trainer.links.abort(epoch)
        for there in self.trainer.world.living():
            if there is not self.trainer:
                self._tell(there, epoch)

    def _tell(self, there: "Trainer", epoch: int) -> None:
        me, network = self.trainer.host, self.trainer.world.network
        if not network.can_talk(me, there.host):
            there.after(0.1, lambda: self._tell(there, epoch))
            return
        there.after(network.delay(), lambda: there.exchange.fail(epoch, me, f"{me} closed its ring links"))

    def fail(self, epoch: int, about: str, why: str) -> None:
        if epoch in self.aborted:
            return
        self.aborted[epoch] = None
        for key in [k for k in self.started if k[0] == epoch]:
            del self.started[key]
            failed = io.ExchangeFailed(key[0], key[1], about, why)
            self.trainer.after(0.0, lambda failed=failed: self.trainer.feed(failed))
        for key in [k for k in self.arrived if k[0] == epoch]:
            del self.arrived[key]


class Trainer(Process):
    """One incarnation of a replica."""

    def __init__(
        self, clockwork: Clockwork, world: "World", host: str, incarnation: int, server: Server, gone: bool
    ) -> None:
        super().__init__(clockwork, f"{host}.{incarnation}")
        self.world = world
        self.host = host
        self.incarnation = incarnation
        self.server = server
        self.links = Links(self)
        self.exchange = Exchange(self)
        self.transfer = Transfer(self)
        self.main = MainThread(self)
        self.pending_dials: dict[tuple[str, int], None] = {}
        self.listening = False
        self._session: Connection | None = None
        self._armed: float | None = None
        self._feeding = False
        self._inbox: list[io.Event] = []
        identity = Identity(
            replica=host,
            incarnation=incarnation,
            link=f"{host}:{incarnation}",
            ckpt=server.url,
            micro_batches=world.settings.micro_batches,
            predecessors_gone=gone,
        )
        state = State(0, 0, self.main.digest)
        self.core = Member(
            identity, world.settings.member, self.clock(), state, tuple(server.memory.snapshots)
        )
        self._performers: dict[type, Callable[[Any], None]] = {
            io.SendPeer: lambda e: self.send_peer(e),
            io.SendLeader: lambda e: self.send_leader(e.message),
            io.LinkUp: lambda e: self.links.link_up(e.record),
            io.Switch: lambda e: self.links.switch(e.record),
            io.StartExchange: lambda e: self.exchange.start(e),
            io.AbortExchange: lambda e: self.exchange.abort(e.epoch),
            io.Publish: self._publish,
            io.FetchState: lambda e: self.transfer.fetch_state(e),
            io.FetchGradient: lambda e: self.transfer.fetch_gradient(e),
            io.CancelFetch: lambda _: self.transfer.cancel(),
            io.Listen: self._listen,
            io.Note: self._note,
        }
        server.attach(self)
        self.after(0.0, self._connect)
        self.after(0.0, self.main.start)

    # --- the core ----------------------------------------------------------------------------------

    def feed(self, event: io.Event) -> None:
        """Hand an event to the core and perform what it orders; events of that come after it."""
        if not self.alive:
            return
        if self.paused:
            self.run(lambda: self.feed(event))
            return
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._inbox and self.alive:
                event = self._inbox.pop(0)
                if self.clockwork.tracing and not isinstance(event, io.Tick):
                    self._trace_event(event)
                for effect in self.core.handle(event, self.clock()):
                    if self.alive:
                        self._perform(effect)
        finally:
            self._feeding = False
        self._arm()

    def _trace_event(self, event: io.Event) -> None:
        if not (isinstance(event, io.FromLeader) and isinstance(event.message, m.BeatReply)):
            core = self.core
            self.clockwork.trace(self.name, f"[{core.phase} {core.state.step}] < {event}")

    def _arm(self) -> None:
        deadline = self.core.next_deadline() if self.alive else None
        if deadline is None or deadline == self._armed:
            return
        self._armed = deadline

        def fire() -> None:
            if self._armed == deadline:
                self._armed = None
                self.feed(io.Tick())

        self.after(self.seconds_until(deadline) + 1e-6, fire)

    def _perform(self, effect: io.Effect) -> None:
        if not (isinstance(effect, io.SendLeader) and isinstance(effect.message, m.Beat)):
            self.clockwork.trace(self.name, f"> {effect}")
        if isinstance(effect, ORDERS):
            self.main.order(effect)
        else:
            self._performers[type(effect)](effect)

    def send_peer(self, effect: io.SendPeer) -> None:
        self.world.checks.said_to_peer(self, effect.message)
        if isinstance(effect.message, m.Bar):
            self.world.happened("bar", self.host)
        self.links.send((effect.replica, effect.incarnation), effect.message)

    def _publish(self, effect: io.Publish) -> None:
        gradient = self.exchange.slots[effect.held.step]

        def publish() -> None:
            if self.server.alive:
                self.server.publish_gradient(effect.generation, gradient, self.listening)
            else:
                self.server = self.world.ensure_server(self)

        self.world.checks.published(self, effect, gradient)
        self.after(self.clockwork.between(0.0, 0.003), publish)

    def _listen(self, effect: io.Listen) -> None:
        self.listening = effect.on

    def _note(self, note: io.Note) -> None:
        self.clockwork.counts[f"member: {note.kind}"] += 1
        self.world.happened(note.kind, self.host)

    # --- the session -------------------------------------------------------------------------------

    def send_leader(self, message: m.MemberMessage) -> None:
        if isinstance(message, m.Report):
            self.world.checks.reported(self, message)
            self.world.happened("report", self.host)
        if isinstance(message, m.Running):
            self.world.checks.running(self, message)
        if self._session is not None:
            self._session.send(0, message)

    def _connect(self) -> None:
        """Keep a session open: to whichever lighthouse leads, after a back-off."""
        retry = self.clockwork.between(0.02, 0.2)
        leader = self.world.find_leader(self.host)
        if leader is None:
            self.after(retry, self._connect)
            return

        def closed(why: str) -> None:
            self._session = None
            self.feed(io.LeaderLost())
            self.after(retry, self._connect)

        holder: list[Connection] = []
        near = End(self, self.host, lambda x: self.feed(io.FromLeader(cast(m.LeaderMessage, x))), closed)
        far = End(
            leader,
            leader.name,
            lambda x: leader.on_session(holder[0], x),
            lambda _: leader.on_session_closed(holder[0]),
        )
        self._session = Connection(self.world.network, near, far)
        holder.append(self._session)
        self.feed(io.LeaderConnected())

    def exit(self, code: int, reason: str) -> None:
        """The process ends by itself."""
        if self.alive:
            self.clockwork.trace(self.name, f"exits {code}: {reason}")
            self.world.exited(self, code, reason)
