"""A trainer process: the real member core, and around it the client's shell in virtual time.

``Trainer`` is the control thread (events to the core, effects performed), ``MainThread`` the user's loop,
``Links`` the control links, ``Ring`` the data plane, ``Transfer`` the fetches. Messages travel as the bytes
of the shipping codec.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace
from sim.clockwork import Clockwork, Process
from sim.links import Links
from sim.main_thread import MainThread
from sim.network import Connection, End, decode, encode
from sim.ring import Ring
from sim.server import Server
from sim.transfer import Transfer

from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

if TYPE_CHECKING:
    from sim.world import World

ORDERS = (
    io.Compute,
    io.Apply,
    io.Install,
    io.TellDigest,
    io.TakeSnapshot,
    io.DropGradient,
    io.Finish,
    io.Stop,
)


def is_beat(effect: io.Effect) -> bool:
    return isinstance(effect, io.SendLeader) and isinstance(effect.message, m.Heartbeat)


class Trainer(Process):
    """One incarnation of a replica."""

    main_class = MainThread
    links_class = Links
    ring_class: type[Any] = Ring
    transfer_class = Transfer

    def __init__(
        self,
        clockwork: Clockwork,
        world: "World",
        host: str,
        incarnation: int,
        server: Server,
        before: tuple[int, ...] = (),
    ) -> None:
        super().__init__(clockwork, f"{host}.{incarnation}")
        self.world = world
        self.host = host
        self.incarnation = incarnation
        self.server = server
        self.links = self.links_class(self)
        self.ring = self.ring_class(self)
        self.transfer = self.transfer_class(self)
        self.main = self.main_class(self)
        self.pending_dials: dict[tuple[str, int], None] = {}
        self.listening = False
        self.answered = self.clock()  # when the newest answered heartbeat was sent
        self.fallen = False  # whether this trainer has sent CannotContinue
        self._beats: dict[int, float] = {}
        self._session: Connection | None = None
        self._missed = False
        self._armed: float | None = None
        self._feeding = False
        self._inbox: list[io.Event] = []
        identity = m.OpenSession(
            generation=0,
            step=0,
            digest=self.main.digest,
            epoch=0,
            snapshots=tuple(server.memory.snapshots),
            replica=host,
            incarnation=incarnation,
            link=f"{host}:{incarnation}",
            ckpt=server.url,
            micro_batches=world.settings.micro_batches,
            predecessors=before,
            sharing=world.settings.sharing,
            shares=world.shares_of(host),
            spare=host == world.settings.spare,
            durable=world.listed(),
            ended=world.hosts[host].ended,
            rack=world.settings.racks.get(host, ""),
            data=world.data_of(host),
        )
        config = replace(world.member_config_of(host), plan=world.first_plan())
        self.core = MemberCore(identity, config, self.clock())
        self._performers: dict[type, Callable[[Any], None]] = {
            io.SendPeer: lambda e: self.send_peer(e),
            io.Carry: lambda e: self.ring.carry(e.message) if world.carries else None,
            io.SendLeader: lambda e: self.send_leader(e.message),
            io.LinkUp: self._link_up,
            io.Probe: lambda e: self.links.probe(e.members),
            io.Switch: lambda e: self.links.switch(e.record),
            io.StartExchange: lambda e: self.ring.start(e),
            io.AbortExchange: lambda e: self.ring.abort(e.epoch, e.why),
            io.Publish: self._publish,
            io.FetchState: lambda e: self.transfer.fetch_state(e),
            io.FetchGradient: lambda e: self.transfer.fetch_gradient(e),
            io.CancelFetch: lambda _: self.transfer.cancel(),
            io.RetainGradients: self._listen,
            io.WriteJournal: self._note,
            io.ClaimAbove: self._claim_above,
        }
        server.attach(self)
        self.after(0.0, self._connect)
        self.after(0.0, self.main.start)

    # --- the core ----------------------------------------------------------------------------------

    def feed(self, event: io.Event) -> None:
        """Feed an event to the core and perform its effects; events of these effects come later."""
        if not self.alive:
            return
        if self.paused:
            self.run(lambda: self.feed(event))
            return
        self._inbox.append(event)
        if self._feeding or self.host in self.world.mute:
            return
        self._feeding = True
        try:
            while self._inbox and self.alive:
                event = self._inbox.pop(0)
                if self.clockwork.watched and not isinstance(event, io.Tick):
                    self._trace_event(event)
                if isinstance(event, io.FromPeer) and isinstance(event.message, m.CommitVote):
                    self.world.checks.heard_vote(self, event.replica, event.message)
                for effect in self.core.handle(event, self.clock()):
                    if self.alive:
                        self._perform(effect)
        finally:
            self._feeding = False
        self._arm()

    def wait_in_ring(self, replica: str) -> None:
        """Note that the data plane waits for bytes of ``replica``."""
        self.core.handle(io.RingWaitsFor(replica), self.clock())

    def _trace_event(self, event: io.Event) -> None:
        if not (isinstance(event, io.FromLeader) and isinstance(event.message, m.HeartbeatAck)):
            core = self.core
            self.clockwork.show(self.name, "<", event, f"[{core.session.phase} {core.memory.state.step}] ")

    def _arm(self) -> None:
        deadline = self.core.next_deadline() if self.alive else None
        if deadline is None or deadline == self._armed:
            return
        self._armed = deadline

        def fire() -> None:
            if self._armed == deadline:
                self._armed = None
                self.count_tick()
                self.feed(io.Tick())

        self.after(self.seconds_until(deadline) + 1e-6, fire)

    def _perform(self, effect: io.Effect) -> None:
        if self.clockwork.watched and not is_beat(effect):
            self.clockwork.show(self.name, ">", effect)
        if isinstance(effect, ORDERS):
            self.main.order(effect)
        else:
            self._performers[type(effect)](effect)

    def send_peer(self, effect: io.SendPeer) -> None:
        self.world.checks.said_to_peer(self, effect.message)
        if isinstance(effect.message, m.CommitVote):
            self.world.happened("commit vote", self.host)
        if isinstance(effect.message, m.Contribution) and not effect.message.padding:
            self.count_told(effect.message)
        self.links.send((effect.replica, effect.incarnation), effect.message)

    def count_told(self, message: m.Contribution) -> None:
        """Count why a contribution goes over the links although the ring carries others."""
        if not self.world.carries:
            return
        round_, rounds = self.core.rounds.round, self.core.rounds
        if round_ is None or rounds.carried_in != message.fence.epoch:
            return
        why = "left behind" if round_.gradient_digest else "late"
        self.clockwork.counts[f"carried: told because it is {why}"] += 1

    def _publish(self, effect: io.Publish) -> None:
        gradient = self.ring.result(effect.prepared.step)

        def publish() -> None:
            if self.server.alive:
                self.server.publish_gradient(effect.generation, gradient, self.listening)
            else:
                self.server = self.world.ensure_server(self)

        self.world.checks.published(self, effect, gradient)
        self.after(self.clockwork.between(0.0, 0.003), publish)

    def _link_up(self, effect: io.LinkUp) -> None:
        self.world.checks.believed(self, effect.record)
        self.links.link_up(effect.record)

    def _listen(self, effect: io.RetainGradients) -> None:
        self.listening = effect.on

    def _note(self, note: io.WriteJournal) -> None:
        self.clockwork.counts[f"member: {note.kind}"] += 1
        if note.kind in ("resume", "outside"):
            self.world.checks.released(self)
        elif note.kind == "abort":
            self.world.checks.aborted(self, note.epoch, note.step)
        elif note.kind == "installed":
            self.fallen = False
            self.world.checks.healed(self)
        self.world.happened(note.kind, self.host)

    def _claim_above(self, effect: io.ClaimAbove) -> None:
        self.world.hosts[self.host].above = effect.incarnation

    # --- the session -------------------------------------------------------------------------------

    def send_leader(self, message: m.MemberMessage) -> None:
        if isinstance(message, m.Report):
            self.world.checks.reported(self, message)
            self.world.happened("report", self.host)
        if isinstance(message, m.CannotContinue):
            self.fallen = True
            self.world.ended_by_wish(self.host)
        if isinstance(message, m.Heartbeat):
            self._beats[message.number] = self.clock()
        if isinstance(message, m.Running):
            self.fallen = False
            self.world.checks.running(self, message)
        if self._session is not None:
            self._session.send(0, encode(message))

    def _connect(self) -> None:
        """Keep a session with the leading lighthouse open; reconnect after a pause."""
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
        near = End(self, self.host, self._from_leader, closed)
        far = End(
            leader,
            leader.name,
            lambda x: leader.on_session(holder[0], x),
            lambda _: leader.on_session_closed(holder[0]),
        )
        self._session = Connection(self.world.network, near, far)
        holder.append(self._session)
        self.feed(io.LeaderConnected())

    def _from_leader(self, data: object) -> None:
        message = cast(m.LeaderMessage, decode(data))
        if isinstance(message, m.HeartbeatAck):
            self.answered = max(self.answered, self._beats.pop(message.number, 0.0))
        if isinstance(message, m.Epoch | m.RosterDelta):
            self._missed = self.world.network.unheard.pop(self.host, False)
            if self._missed:
                self.after(1.0, self._say_again)
                return
        self.feed(io.FromLeader(message))

    def _say_again(self) -> None:
        """Send the record again, because a member that missed an epoch learns of it only from a later one."""
        if self._missed and self._session is not None:
            self._session.reset("reset after a word that was not heard")

    def finish(self, order: io.Finish) -> None:
        """End the trainer, because the job is over. If no lighthouse knows of the end, leave a note on the
        host for the next process.
        """
        if order.alone:
            self.clockwork.counts["path: ended without a lighthouse"] += 1
        if order.ended is not None:
            self.world.hosts[self.host].ended = self.server.ended = order.ended
        self.world.checks.over(self, order)
        self.exit(0, "finished")

    @staticmethod
    def is_answer(data: object) -> bool:
        """Return whether the message answers a heartbeat."""
        return isinstance(decode(data), m.HeartbeatAck)

    def reach(self, world: Any) -> None:
        """Change the part of the world that this process reaches; its session ends."""
        self.world = world
        if self._session is not None:
            self._session.reset("timed out")

    def stop(self, order: io.Stop) -> None:
        """End the process as its core says."""
        self.exit(order.code, order.reason)

    def exit(self, code: int, reason: str) -> None:
        """End the process with an exit code of its own."""
        if self.alive:
            self.clockwork.trace(self.name, f"exits {code}: {reason}")
            self.world.exited(self, code, reason)
