"""One job while this lighthouse leads: its core, the sessions that speak to it, and its record.

The core decides, this shell performs: a message goes into its connection's queue, a write or a read of
the record becomes a task whose outcome returns to the core as an event. A failed write is read again
after a pause that grows with every failure, so that a store in trouble is not asked ever faster. A
defect in the core costs this job its sessions for a moment, and no other job anything: the core is made
anew from the record.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fabric.errors import ProtocolError, StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.connections import connection as codes
from fabric.lighthouse.connections.connection import (
    FrameCache,
    MemberConnection,
    SendPacer,
    WorkQueue,
    text_frame,
)
from fabric.lighthouse.diagnosis.diagnosis_task import DiagnosisTask
from fabric.lighthouse.diagnosis.peer_addresses import PeerAddresses
from fabric.lighthouse.diagnosis.server_states import CheckpointServers, HeardStatus
from fabric.lighthouse.diagnosis.status_text import WaitSentence, no_room, numbers, others, policy_kept
from fabric.lighthouse.history.ledger import JobSample, TimeLedger
from fabric.lighthouse.history.recoverable import recoverable
from fabric.lighthouse.history.recovery import NAMED, Recoveries, RecoveryRecord
from fabric.lighthouse.jobs.epoch_notice import notice_of
from fabric.lighthouse.jobs.job_events import EventLog
from fabric.lighthouse.jobs.job_store import Deposed, StoredRecord
from fabric.lighthouse.jobs.retention import Retention
from fabric.lighthouse.jobs.term_context import TermContext, entropy
from fabric.lighthouse.telemetry.metrics import JobGauges
from fabric.model import Policy, Record
from fabric.protocol.leader.core import MANY, LeaderCore
from fabric.protocol.leader.view import LeaderView
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.runtime.driver import Driver
from fabric.runtime.logs import fields

log = logging.getLogger(__name__)

# An unchanged pulse is told to the core this often; a changed one at once.
PULSE_S = 0.2
# How often the ledger is looked at (more rarely where sessions are many), and written; sooner when its state
# changes.
LOOK_S = 0.25
_SESSIONS_PER_S = 4000
LEDGER_S = 60.0
_LEDGER_CHANGED_S = 5.0
_RETRY_S = (0.05, 1.0)
_REMAKE_S = 1.0
# Where members are many, recoveries are looked at so often at most.
_NOTE_S = 0.01
# What all members answer when they are told of an epoch.
_ANSWERS = ('{"kind":"Report"', '{"kind":"Running"')
_KEEP_LARGE_S = 1.0
_ENDS_PER_TURN = 20  # connections, each of which takes some 150 microseconds


class Job:
    """``begin`` once; then events come in by the methods below. ``close`` ends everything."""

    def __init__(
        self,
        name: str,
        context: TermContext,
        stored: StoredRecord,
        events: EventLog,
        recoveries: Recoveries,
    ) -> None:
        self.name = name
        self.ledger = TimeLedger()
        self.ledger_is_known = True  # False while what an earlier leader stored has not been read
        self._looked = self._stored_ledger = context.clock()
        self.events = events
        self.recoveries = recoveries
        self.servers = CheckpointServers()
        self.core = LeaderCore(name, context.config, entropy(), context.clock())
        self.sessions: dict[str, MemberConnection] = {}
        # By replica and rank for each connection: a second process of an id, which is refused, has one too.
        self.pulses: dict[MemberConnection, dict[tuple[str, int], HeardStatus]] = {}
        self._context = context
        self._stored = stored
        self._driver: Driver[io.Event, io.Effect] | None = None
        self._opening: MemberConnection | None = None
        self._failures = 0
        self._retention = Retention(time.time(), context.clock())
        self._changed = asyncio.Event()  # the record has; a new one is made every time
        self._record: Record | None = None
        self._frames = FrameCache()
        self._pacer = SendPacer()
        self._answers = WorkQueue()
        self._noted = 0.0
        self._waits = WaitSentence()
        self._unkept: dict[int, RecoveryRecord] = {}
        self.peer_addresses = PeerAddresses()
        access = partial(context.access_to, name)
        self._explainer = DiagnosisTask(
            access, self.peer_addresses, context.tasks, self._note_cause, self._keep
        )

    @property
    def now(self) -> float:
        """The core's clock, monotonic seconds."""
        return self._context.clock()

    @property
    def view(self) -> LeaderView:
        """What the core shows."""
        return self.core.view

    @property
    def is_running(self) -> bool:
        """False for the moment between a defect and the core's remaking."""
        return self._driver is not None

    @property
    def max_replicas(self) -> int:
        """As many as this lighthouse lets a job have."""
        return self._context.max_replicas

    @property
    def is_idle(self) -> bool:
        """Nothing is stored for it and nobody speaks to it."""
        return not (self.view.record or self.view.record_in_flight or self.sessions or self.pulses)

    @property
    def is_complete(self) -> bool:
        """Whether it has finished."""
        return self.view.is_complete

    def is_over_since(self, seconds: float, unix_s: float) -> bool:
        """Whether it was complete so long ago, and nobody speaks to it any more."""
        record = self.view.record
        is_used = self.sessions or self.pulses or self.view.record_in_flight
        if record is None or not record.complete or is_used:
            self._retention.is_in_use()
            return False
        return self._retention.is_over(record.ended, seconds, unix_s, self.now)

    async def delete(self) -> bool:
        """Remove what the store has of it. Raises StoreError."""
        return await self._stored.delete()

    @property
    def gauges(self) -> JobGauges:
        view = self.view
        record, state = view.record, recoverable(view, self.now)
        roster = record.roster if record else ()
        seen = [p.seen for x in roster if (p := view.peers.get(x.replica)) is not None]
        return JobGauges(
            heartbeat_age_s=self.now - min(seen, default=self.now),
            ledger=self.look_at_ledger().seconds,
            is_complete=self.is_complete,
            has_failed=record is not None and bool(record.failed),
            job=self.name,
            epoch=record.epoch if record else 0,
            step=view.top_step(),
            members=len(record.roster) if record else 0,
            sessions=len(self.sessions),
            recoverable_step=None if state is None else state["step"],
            recoverable_age_s=None if state is None else state["age_s"],
            silent_servers=len(self.servers.silent),
            durable_failing=len(self.servers.failing),
        )

    def look_at_ledger(self) -> TimeLedger:
        """Where the job's time went, up to now."""
        view, record = self.view, self.view.record
        is_on = record is not None and not record.complete and not record.failed
        members = len(record.roster) if record is not None else 0
        wanted = view.policy.start_replicas
        before, self._looked = self.ledger.state, self.now
        # A new leader has heard nobody yet: what the record says is where the generation began.
        step = -1 if view.highest_step is None else view.highest_step
        generation = record.generation if record is not None else 0
        look = JobSample(is_on, step, members, wanted, self.recoveries.is_recovering, generation)
        self.ledger.observe(look, self.now)
        self.servers.look(view, self.now, self._note)
        if self.is_running and self.ledger_is_known:
            self._keep_ledger(before, self.ledger.state)
        return self.ledger

    def begin(self, record: Record | None) -> None:
        """Lead this job from ``record``, which the store holds now."""
        self._record = record
        self.recoveries.begin(record)
        self._driver = Driver(
            self.core, self._perform, tick=io.LeaderTick(), on_crash=self._remake, clock=self._context.clock
        )
        self._feed(io.Elected(self._context.term.store_id, record, time.time()))

    def close(self, code: int, reason: str) -> None:
        """Feed nothing more, and close every connection with ``code``: of thousands a few per turn, so that a
        lease can be given back meanwhile."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        self._changed.set()
        connections = [*self.sessions.values(), *self.pulses]
        self.sessions.clear()
        self.pulses.clear()
        ends = WorkQueue(_ENDS_PER_TURN)
        for connection in connections:
            ends.add(partial(connection.end, code, reason))

    # --- sessions and pulses -------------------------------------------------------------------------

    _tensors: tuple[str, ...] = ()

    def open(self, connection: MemberConnection, session: m.OpenSession, policy: Policy) -> bool:
        """Begin (or say again) a session; False when the core refused it, and it is being closed."""
        record = self.view.record
        allowed, needed = self._context.max_replicas, policy.min_replicas if record is None else 0
        count = others(session.replica, self.sessions, record, allowed)
        reason = no_room(self.name, session.replica, count, needed, allowed)
        if reason := reason or self.peer_addresses.stranger(session):
            self._note("session refused", session.replica, reason)
            connection.send(self._frames.of(m.Rejected(reason), connection.accepts_compression))
            connection.end(codes.REFUSED, reason)
            return False
        start, most = min(policy.start_replicas, allowed), min(policy.max_replicas, allowed)
        if start < policy.start_replicas and not self.sessions:
            why = f"it asked to start with {policy.start_replicas} replicas, this lighthouse allows {allowed}"
            self._note("policy kept", session.replica, why)
        policy = replace(policy, max_replicas=most, start_replicas=start)
        is_first = not self.sessions
        if not is_first and policy != self.view.policy:
            self._note("policy kept", session.replica, policy_kept(policy, self.view.policy))
        if session.tensors and session.tensors == self._tensors:
            session = replace(session, tensors=self._tensors)  # thousands of sessions share one list
        self._tensors = session.tensors
        connection.replica, connection.incarnation = session.replica, session.incarnation
        connection.accepts_compression = bool(session.roster)
        self._opening = connection
        self._feed(io.SessionOpened(session, policy if is_first else None))
        self._opening = None
        if not self.is_running:
            connection.end(codes.DEFECT, "the lighthouse met a defect of its own: connect again")
            return False
        peer = self.view.peers.get(session.replica)
        if peer is None or peer.session is not session:
            connection.end(codes.REFUSED, "refused")
            return False
        older = self.sessions.get(session.replica)
        self.sessions[session.replica] = connection
        self.peer_addresses.session(session, connection.address, is_trusted=connection.is_trusted)
        if older is not None and older is not connection:
            older.end(codes.REPLACED, "replaced by a newer session of the same replica")
        return True

    def overloaded(self, seconds: float) -> None:
        """So many connect to this lighthouse that some have to wait, for so many seconds yet."""
        self._feed(io.AcceptQueueFull(seconds))

    def hear(self, connection: MemberConnection, message: m.MemberMessage) -> None:
        """One message of an open session; what a replaced one still says is dropped."""
        if self.sessions.get(connection.replica) is connection:
            self._feed(io.FromMember(connection.replica, connection.incarnation, message))

    def defer(self, text: str, work: Callable[[], object]) -> bool:
        """Whether ``work`` on it waits for its turn: what thousands answer at once, between their beats."""
        if is_deferred := self._is_many and text.startswith(_ANSWERS):
            self._answers.add(work)
        return is_deferred

    @property
    def _is_many(self) -> bool:
        return len(self.sessions) >= MANY

    def closed(self, connection: MemberConnection) -> None:
        """The socket has ended, by whatever cause."""
        if self.sessions.get(connection.replica) is connection:
            del self.sessions[connection.replica]
            self._feed(io.SessionClosed(connection.replica, connection.incarnation))

    def pulse(self, connection: MemberConnection, pulse: m.TrainerStatus) -> None:
        """One beat; many that say the same are told at ``PULSE_S``; that states age says nothing new."""
        if connection not in self.pulses:
            self.pulses[connection] = {}
            if self.view.record is not None:
                connection.send(text_frame(notice_of(self.view.record)))
        heard, key = self.pulses[connection], (pulse.replica, pulse.rank)
        known, now = heard.get(key), self.now
        if (
            known is not None
            and now - known.told < PULSE_S
            and replace(known.pulse, number=pulse.number, ages_s=pulse.ages_s) == pulse
        ):
            return
        heard[key] = HeardStatus(pulse, now)
        self.peer_addresses.pulse(pulse.replica, pulse.rank, connection.address)
        self._feed(io.TrainerStatusSeen(pulse))

    def pulse_closed(self, connection: MemberConnection) -> None:
        """The connection of a checkpoint server has ended; it may have another one already."""
        for (replica, rank), source in self.pulses.pop(connection, {}).items():
            others = (heard.get((replica, rank)) for heard in self.pulses.values())
            if not any(x is not None and x.pulse.ckpt == source.pulse.ckpt for x in others):
                self._feed(io.TrainerStatusClosed(replica, source.pulse.ckpt, rank))

    def operate(self, asked: io.Operator) -> None:
        """What a person decides, on the record with who and why."""
        self._note(f"{asked.action} asked", asked.replica, f"by {asked.who}: {asked.why}{numbers(asked)}")
        self._feed(asked)

    async def kept(self, within_s: float) -> None:
        """Wait until the store has the operators' orders. Raises StoreUnavailable where it does not take them
        in that time, or this lighthouse leads no longer: they may be lost, and can be said again."""
        core, view = self.core, self.view
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_running and self.core is core and view.has_unwritten_overrides:
                    await self._changed.wait()
        if not self.is_running or self.core is not core or view.has_unwritten_overrides:
            raise StoreUnavailable("it is not certain that the store has this: say it again in a moment")

    # --- effects ---------------------------------------------------------------------------------------

    def _feed(self, event: io.Event) -> None:
        if self._driver is None:
            return
        self._driver.feed(event)
        now, is_new = self.now, self.view.record is not self._record
        if is_new:
            self._changed.set()
            self._changed = asyncio.Event()
            self._count_evictions(self._record, self.view.record)
            self._record = self.view.record
            self._notify_servers()
        if is_new or not self._is_many or now - self._noted >= _NOTE_S:
            self._noted = now
            self._note_recoveries()
        if now - self._looked >= max(LOOK_S, len(self.sessions) / _SESSIONS_PER_S):
            self.look_at_ledger()

    def _notify_servers(self) -> None:
        """Checkpoint servers log which epoch is in force and why, as the replicas do."""
        if self._record is not None:
            frame = text_frame(notice_of(self._record))
            for connection in self.pulses:
                connection.send(frame)

    def _perform(self, effect: io.Effect) -> None:
        if isinstance(effect, io.SendMember):
            self._send(effect)
        elif isinstance(effect, io.WriteRecord):
            self._context.tasks.start(f"write {self.name}", self._write(effect.record, self._driver))
        elif isinstance(effect, io.ReadRecord):
            self._context.tasks.start(f"read {self.name}", self._read(self._driver))
        elif isinstance(effect, io.StepDown):
            self._context.term.resign(f"job {self.name}: {effect.reason}")
        else:
            self._note(effect.kind, effect.about, effect.why, effect.epoch, effect.incident_id)
            if effect.kind in ("evicting", "aborted"):
                # A tick of the driver's own may have brought it, and nothing be heard until it is answered.
                asyncio.get_running_loop().call_soon(self._note_recoveries)

    def _send(self, effect: io.SendMember) -> None:
        if not self._context.term.holds():
            return
        message = self._waits.attach(effect.message, self.view, self.now)
        for connection in (self._opening, self.sessions.get(effect.replica)):
            if connection is not None and connection.is_of(effect.replica, effect.incarnation):
                self._pacer.send(connection, self._frames.of(message, connection.accepts_compression))
                if isinstance(effect.message, m.Rejected) and not effect.message.retry:
                    connection.end(codes.REFUSED, effect.message.reason)
                return

    async def _write(self, record: Record, asker: object) -> None:
        why = ""
        failed = io.WriteFailed(record.nonce, definite=True)
        if not self._context.term.holds():
            return
        try:
            if not await self._stored.write(record):
                why = "the store's guards refused it"
        except StoreIndefinite as error:
            why, failed = str(error), io.WriteFailed(record.nonce, definite=False)
        except StoreError as error:
            why = str(error)
        if why:
            self._failures += 1
            self._note("write failed", "", f"epoch {record.epoch}: {why}")
        else:
            self._failures = 0
        self._answer(asker, failed if why else io.RecordWritten(record.nonce))

    async def _read(self, asker: object) -> None:
        record = await self._read_stubbornly(asker)
        if self._driver is asker:
            self._answer(asker, io.RecordRead(record))

    async def _read_stubbornly(self, asker: object) -> Record | None:
        """The record, asking until there is an answer or nobody waits for it any more."""
        while self._driver is asker and not self._context.term.is_over:
            if self._failures:
                await asyncio.sleep(min(_RETRY_S[0] * 2 ** (self._failures - 1), _RETRY_S[1]))
            try:
                return await self._stored.read()
            except (Deposed, ProtocolError) as error:
                self._context.term.resign(f"job {self.name}: {error}")
            except StoreError as error:
                self._failures = min(self._failures + 1, 10)
                log.warning("job %s: its record cannot be read: %s", self.name, error)
        return None

    def _answer(self, asker: object, event: io.Event) -> None:
        """An outcome is for the core that ordered it, not for one that came after."""
        if self._driver is asker:
            self._feed(event)

    def _note_recoveries(self) -> None:
        if self._driver is None:
            return
        changed = self.recoveries.observe(self.view, self.events.newest, time.time())
        for recovery in changed:
            self._context.metrics.recovery(self.name, recovery)
            self._keep(recovery)
        if changed:
            self.look_at_ledger()  # a recovery may be over before the next look
        self._explainer.observe(self.view, changed, self.now)

    def _keep_ledger(self, before: str, state: str) -> None:
        """Into the store when it changes its state, and now and then; a later one is as good as one that is
        lost."""
        waits_s = LEDGER_S if state == before else _LEDGER_CHANGED_S
        if self.now - self._stored_ledger >= waits_s:
            self._stored_ledger = self.now
            saved = self.ledger.saved(time.time())
            self._context.tasks.start(f"keep the ledger of {self.name}", self._write_ledger(saved))

    async def _write_ledger(self, saved: dict[str, Any]) -> None:
        try:
            await self._stored.keep_ledger(saved)
        except StoreError as error:
            log.warning("job %s: its ledger is not in the store: %s", self.name, error)

    def _keep(self, recovery: RecoveryRecord) -> None:
        """Into the store, in a moment; when it is complete, to whoever collects traces."""
        if self._context.traces is not None:
            self._context.traces.recovery(self.name, recovery)
        idle = not self._unkept
        self._unkept[recovery.id] = recovery
        if idle:
            self._context.tasks.start(f"keep recoveries of {self.name}", self._keep_recoveries())

    async def _keep_recoveries(self) -> None:
        """Into the store, one after the other; what changes meanwhile is written once more. They are for
        people: one that cannot be written stays in memory, and nothing waits for it."""
        while self._unkept:
            recovery = self._unkept.pop(next(iter(self._unkept)))
            try:
                await self._stored.keep(recovery, [r.id for r in self.recoveries.kept])
            except StoreError as error:
                log.warning(
                    "job %s: recovery record %d is not in the store: %s", self.name, recovery.id, error
                )
            if len(recovery.lost) > NAMED:
                await asyncio.sleep(_KEEP_LARGE_S)  # it changes with each of thousands that comes back

    # --- the rest ----------------------------------------------------------------------------------------

    def _note_cause(self, kind: str, about: str, why: str, incident_id: str) -> None:
        self._note(kind, about, why, incident_id=incident_id)

    def _note(self, kind: str, about: str, why: str, epoch: int | None = None, incident_id: str = "") -> None:
        view = self.view
        if epoch is None:
            epoch = view.record.epoch if view.record else 0
        event = self.events.add(kind, epoch, about, why, incident_id)
        self._context.metrics.event(self.name, kind)
        peer = view.peers.get(about)
        incarnation = peer.incarnation if peer is not None else None
        where = {"job": self.name, "replica": about, "incarnation": incarnation, "epoch": epoch}
        text = ": ".join(filter(None, (kind, about, event.why)))
        # The newest that was heard of, which is known: the highest of all members' would be looked for.
        log.info("%s", text, extra=fields(**where, step=view.highest_step or 0, incident_id=incident_id))

    def _count_evictions(self, before: Record | None, now: Record | None) -> None:
        if before is None or now is None or now.generation != before.generation or not now.is_forced:
            return
        left = [x for x in before.roster if not now.lists(x.replica, x.incarnation) and not x.leaving]
        if left:
            self._context.metrics.evicted(self.name, len(left))

    def _remake(self, error: BaseException) -> None:
        log.error("job %s: a defect in its leader; it is made anew", self.name, exc_info=error)
        self._note("defect", "", f"{type(error).__name__}: {error}")
        self.close(codes.DEFECT, "the lighthouse met a defect of its own: connect again")
        self._context.tasks.start(f"remake {self.name}", self._begin_again())

    async def _begin_again(self) -> None:
        await asyncio.sleep(_REMAKE_S)
        self._failures = 0
        record = await self._read_stubbornly(None)
        if self._driver is None and self._context.term.in_force():
            self.core = LeaderCore(self.name, self._context.config, entropy(), self._context.clock())
            self.begin(record)
