"""A lighthouse process: takes part in elections, drives the leader core while it leads, serves sessions."""

import random
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace
from sim.clockwork import Clockwork, Process
from sim.network import Connection, decode, encode
from sim.store import Reach

from fabric.model import OperatorOverrides, Record
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

if TYPE_CHECKING:
    from sim.world import World

ELECTION_S = 0.15


class Lighthouse(Process):
    """One process of a lighthouse; a restart makes another object with the same name."""

    def __init__(self, clockwork: Clockwork, world: "World", name: str) -> None:
        super().__init__(clockwork, name)
        self.world = world
        self.store = Reach(world.store, name)
        self.config = world.settings.leader
        self.core: LeaderCore | None = None
        self.revision = 0
        self.lease_end = 0.0  # the end of my lease by my own clock
        self.sessions: dict[str, tuple[int, Connection]] = {}  # replica -> incarnation, connection
        self.statuses: dict[tuple[str, str, int], Connection] = {}
        self._said: dict[Connection, tuple[m.TrainerStatus, float]] = {}  # the last status, and when it came
        # the session whose first message is under way
        self._opening: tuple[str, int, Connection] | None = None
        self._armed: float | None = None
        self._feeding = False
        self._inbox: list[io.Event] = []
        self.after(clockwork.between(0.0, ELECTION_S), self._campaign)

    @property
    def leads(self) -> bool:
        return self.alive and self.core is not None and self.core.state.leading

    # --- election ----------------------------------------------------------------------------------

    def _campaign(self) -> None:
        self.after(ELECTION_S, self._campaign)
        if self.core is None:
            sent = self.clock()
            self.store.acquire(self.name, lambda r: self.run(lambda: self._acquired(r, sent)))
            return
        if not self.holds():
            return
        sent, revision = self.clock(), self.revision
        self.store.renew(revision, lambda ok: self.run(lambda: self._renewed(ok, sent, revision)))

    def _acquired(self, revision: int, sent: float) -> None:
        if revision == 0 or self.core is not None:
            return
        self.revision, self.lease_end = revision, sent + self.store.lease_s * 0.8
        self.core = LeaderCore(
            "job", self.config, random.Random(f"{self.clockwork.seed}/{revision}"), self.clock()
        )
        self.store.read(lambda record: self.run(lambda: self._elected(revision, record)))

    def _elected(self, revision: int, record: Record | None) -> None:
        if self.core is not None and self.revision == revision:
            self.clockwork.trace(self.name, f"elected {revision}")
            if record is not None and record.overrides != OperatorOverrides():
                self.clockwork.counts["orders: known to the next leader"] += 1
            if record is not None and record.adaptation.speeds:
                self.clockwork.counts["shares: known to the next leader"] += 1
            if record is not None and record.adaptation.layouts:
                self.clockwork.counts["layouts: known to the next leader"] += 1
            self.feed(io.Elected(self.store.name, record, 1e9 + self.clockwork.now + self.world.time_error()))
            chance = random.Random(f"crowd {self.clockwork.seed}/{revision}")
            if chance.random() < 0.25:
                self.clockwork.counts["crowd"] += 1
                self.feed(io.AcceptQueueFull(chance.uniform(0.0, 5.0)))

    def _renewed(self, ok: bool, sent: float, revision: int) -> None:
        if self.core is None or self.revision != revision:
            return
        if ok:
            self.lease_end = sent + self.store.lease_s * 0.8
        else:
            self._step_down("its lease has ended")

    def _step_down(self, why: str) -> None:
        self.clockwork.trace(self.name, f"steps down: {why}")
        self.clockwork.counts["step down"] += 1
        self.core = None
        self._inbox.clear()
        self.store.resign(self.revision)
        for _, connection in list(self.sessions.values()):
            connection.close(1, "not the leader")
        for connection in list(self.statuses.values()):
            connection.close(1, "not the leader")
        self.sessions.clear()
        self.statuses.clear()
        self._said.clear()

    def holds(self) -> bool:
        """Return before every act of a leader whether its lease surely still holds."""
        if self.core is not None and self.clock() > self.lease_end:
            self._step_down("its lease may have ended")
        return self.core is not None

    # --- the core ----------------------------------------------------------------------------------

    def feed(self, event: io.Event) -> None:
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._inbox and self.core is not None:
                event = self._inbox.pop(0)
                if not isinstance(event, io.TrainerStatusSeen | io.StatusesUnchanged | io.LeaderTick):
                    self.clockwork.show(self.name, "<", event)
                for effect in self.core.handle(event, self.clock()):
                    if self.core is not None:
                        self._perform(effect)
        finally:
            self._feeding = False
        self._arm()

    def _arm(self) -> None:
        deadline = self.core.next_deadline() if self.core is not None else None
        if deadline is None or (self._armed is not None and self._armed <= deadline):
            return
        self._armed = deadline

        def fire() -> None:
            if self._armed != deadline:
                return
            self._armed = None
            if self.core is not None:
                self.count_tick()
                self.feed(io.LeaderTick())

        self.after(self.seconds_until(deadline) + 1e-6, fire)

    def _perform(self, effect: io.Effect) -> None:
        if isinstance(effect, io.SendMember):
            self._send(effect)
        elif isinstance(effect, io.WriteRecord):
            self._write(effect)
        elif isinstance(effect, io.ReadRecord):
            core = self.core
            self.store.read(
                lambda record: self.run(
                    lambda: self.feed(io.RecordRead(record)) if self.core is core else None
                )
            )
        elif isinstance(effect, io.StepDown):
            self._step_down(effect.reason)
        else:
            self.clockwork.show(self.name, ">", effect)
            self.world.told(effect)
            self._happened(effect.kind)

    def _happened(self, kind: str) -> None:
        record = self.core.state.record if self.core is not None else None
        if kind == "resume":
            self.world.happened("decided", "")
        elif kind == "shares":
            self.world.happened("shares", "")
        elif kind == "epoch" and record is not None:
            if record.cold == record.epoch and record.epoch > 1:
                self.world.happened("cold start", "")
            if any(x.leaving for x in record.roster):
                self.world.happened("draining", "")
            if not record.is_forced and any(x.joining for x in record.roster):
                self.world.happened("admitted", "")

    def _send(self, effect: io.SendMember) -> None:
        if not self.holds():
            return
        if isinstance(effect.message, m.Epoch):
            self.store.checks.announced(effect.message.record)
        if isinstance(effect.message, m.RosterDelta):
            self.store.checks.announced_change(effect.message)
        if isinstance(effect.message, m.Resume) and self.core is not None:
            assert self.core.state.epoch.decision is not None
            self.store.checks.decided(self.core.state.epoch.decision)
        connection = self._connection_to(effect.replica, effect.incarnation)
        if connection is None:
            return
        if not isinstance(effect.message, m.HeartbeatAck):
            self.clockwork.show(self.name, ">", effect)
        connection.send(1, encode(effect.message))
        if isinstance(effect.message, m.Rejected) and not effect.message.retry:
            connection.close(1, "refused")
            self.clockwork.counts["session refused"] += 1
            self.after(0.0, lambda: self.on_session_closed(connection))

    def _connection_to(self, replica: str, incarnation: int) -> Connection | None:
        if self._opening is not None and self._opening[:2] == (replica, incarnation):
            return self._opening[2]
        known, connection = self.sessions.get(replica, (0, None))
        return connection if known == incarnation else None

    def _write(self, effect: io.WriteRecord) -> None:
        nonce, core = effect.record.nonce, self.core

        def answered(outcome: str) -> None:
            if self.core is not core:
                return
            if outcome == "ok":
                self.feed(io.RecordWritten(nonce))
            else:
                self.feed(io.WriteFailed(nonce, definite=outcome == "refused"))

        self.store.write(
            effect.record, effect.previous, self.revision, lambda o: self.run(lambda: answered(o))
        )

    # --- sessions and statuses -----------------------------------------------------------------------

    def on_session(self, connection: Connection, data: object) -> None:
        """Handle a message on a session; the first message names the replica."""
        if not self.holds():
            connection.close(1, "not the leader")
            return
        message = decode(data)
        if isinstance(message, m.OpenSession):
            self._open(connection, message)
            return
        for replica, (incarnation, known) in self.sessions.items():
            if known is connection:
                self.feed(io.FromMember(replica, incarnation, cast(m.MemberMessage, message)))
                return

    def _open(self, connection: Connection, session: m.OpenSession) -> None:
        """Open a session as the real shell does, after the core has accepted it."""
        name = session.replica
        self._opening = (name, session.incarnation, connection)
        self.feed(io.SessionOpened(session, self.world.policy_of(name)))
        self._opening = None
        peer = self.core.state.liveness.peers.get(name) if self.core is not None else None
        if peer is None or peer.session is not session:
            connection.close(1, "refused")
            return
        old = self.sessions.get(name)
        self.sessions[name] = (session.incarnation, connection)
        if old is not None and old[1] is not connection:
            old[1].close(1, "replaced by a newer session")

    def on_session_closed(self, connection: Connection) -> None:
        for replica, (incarnation, known) in list(self.sessions.items()):
            if known is connection:
                del self.sessions[replica]
                if self.core is not None:
                    self.feed(io.SessionClosed(replica, incarnation))

    def on_status(self, connection: Connection, data: object) -> None:
        if not self.holds():
            connection.close(1, "not the leader")
            return
        status = cast(m.TrainerStatus, decode(data))
        self.statuses[status.replica, status.ckpt, status.rank] = connection
        said, said_at = self._said.get(connection, (None, 0.0))
        if said is not None and replace(said, number=status.number, ages_s=status.ages_s) == status:
            # As a real server does, this one says that nothing has changed.
            self.feed(io.StatusesUnchanged((said,), (self.clock() - said_at,)))
            return
        self._said[connection] = status, self.clock()
        self.feed(io.TrainerStatusSeen(status))

    def on_status_closed(self, connection: Connection) -> None:
        self._said.pop(connection, None)
        for (replica, ckpt, rank), known in list(self.statuses.items()):
            if known is connection:
                del self.statuses[replica, ckpt, rank]
                if self.core is not None:
                    self.feed(io.TrainerStatusClosed(replica, ckpt, rank))
