"""One job while this lighthouse leads: the shell around its leader core.

The core decides, this shell performs. A message goes to its connection at once. A write or a read of the
record becomes a task whose outcome returns to the core as an event. A defect in the core closes the sessions
of this job alone: the shell makes a new core from the record.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import assert_never

from msgspec.structs import replace

from fabric.errors import ProtocolError, StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.connections import connection as codes
from fabric.lighthouse.connections.connection import (
    FrameCache,
    MemberConnection,
    WorkQueue,
    frame_of,
    notice_of,
    terms_of,
)
from fabric.lighthouse.diagnosis.diagnosis_task import DiagnosisTask
from fabric.lighthouse.diagnosis.rank_probe import PeerAddresses
from fabric.lighthouse.diagnosis.slowness import SlownessWatch
from fabric.lighthouse.diagnosis.status_text import (
    CheckpointServers,
    HeardStatus,
    WaitSentence,
    absences,
    counts,
    no_room,
    numbers,
    policy_kept,
)
from fabric.lighthouse.history.ledger import GoodputLedger
from fabric.lighthouse.history.recovery import LEFT, Absence, LaunchReport, recoverable
from fabric.lighthouse.jobs.drills import Drills
from fabric.lighthouse.jobs.job_history import (
    Deposed,
    JobHistory,
    JobPast,
    StoredRecord,
    TermContext,
    entropy,
)
from fabric.lighthouse.telemetry import JobGauges, ReplicaTrouble
from fabric.model import Policy, Record
from fabric.protocol.leader.core import MANY, LeaderCore
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.nodes import SPARE, HostRow, ReplicaNodes
from fabric.runtime.driver import Driver
from fabric.runtime.logs import fields

# The connections of one job: sessions of trainers, and connections of checkpoint servers.


# The core gets an unchanged trainer status this often, and a changed status at once.
STATUS_S = 0.2
_ENDS_PER_TURN = 20  # connections closed per turn of the event loop; each takes some 150 microseconds


class JobConnections:
    """The open connections of one job; sends messages over them."""

    def __init__(self) -> None:
        self.sessions: dict[str, MemberConnection] = {}  # replica -> the connection of its session
        # Statuses are kept by connection, because a second process with this replica and rank, which the core
        # refuses, has a checkpoint server, too.
        self.servers: dict[MemberConnection, dict[tuple[str, int], HeardStatus]] = {}
        self.launchers: dict[str, ReplicaNodes] = {}  # of each replica of several hosts
        self.pacer = WorkQueue()
        self._frames = FrameCache()
        self._opening: MemberConnection | None = None

    @property
    def are_none(self) -> bool:
        return not (self.sessions or self.servers or self.launchers)

    # --- sessions --------------------------------------------------------------------------------------

    @contextmanager
    def opening(self, connection: MemberConnection) -> Iterator[None]:
        """While this context is open, the connection also gets the core's messages for its process."""
        self._opening = connection
        try:
            yield
        finally:
            self._opening = None

    def opened(self, connection: MemberConnection) -> None:
        """Note that the core has accepted this session, which replaces an older one of the replica."""
        older = self.sessions.get(connection.replica)
        self.sessions[connection.replica] = connection
        if older is not None and older is not connection:
            older.end(codes.REPLACED, "replaced by a newer session of the same replica")

    def is_current(self, connection: MemberConnection) -> bool:
        """Whether this is the newest session of its replica."""
        return self.sessions.get(connection.replica) is connection

    def refuse(self, connection: MemberConnection, reason: str) -> None:
        """Say why, and close the connection."""
        connection.send(self._frames.of(m.Rejected(reason), connection.accepts_compression))
        connection.end(codes.REFUSED, reason)

    def send(self, replica: str, incarnation: int, message: m.LeaderMessage) -> None:
        """Send to exactly this process, if it has a session. A final refusal closes its connection."""
        for connection in (self._opening, self.sessions.get(replica)):
            if connection is not None and connection.is_of(replica, incarnation):
                self.pacer.send(connection, self._frames.of(message, connection.accepts_compression))
                if isinstance(message, m.Rejected) and not message.retry:
                    connection.end(codes.REFUSED, message.reason)
                return

    # --- checkpoint servers ----------------------------------------------------------------------------

    def is_new_server(self, connection: MemberConnection) -> bool:
        """Whether this is the connection's first message; note that it has come."""
        if connection in self.servers:
            return False
        self.servers[connection] = {}
        return True

    def is_news(self, connection: MemberConnection, status: m.TrainerStatus, now: float) -> bool:
        """Whether the core should get this status. Growing ages of the same snapshots do not count."""
        heard, key = self.servers[connection], (status.replica, status.rank)
        last = heard.get(key)
        if (
            last is not None
            and now - last.fed_at < STATUS_S
            and replace(last.status, number=status.number, ages_s=status.ages_s) == status
        ):
            return False
        heard[key] = HeardStatus(status, now)
        return True

    def server_closed(self, connection: MemberConnection) -> list[m.TrainerStatus]:
        """Forget this connection; return the newest status of each rank that has no other connection."""
        heard = self.servers.pop(connection, {})
        return [x.status for x in heard.values() if not self._is_heard(x.status)]

    def dropped(
        self, connection: MemberConnection, statuses: Sequence[m.TrainerStatus]
    ) -> list[m.TrainerStatus]:
        """Forget the ranks that are missing in ``statuses``; return as ``server_closed`` does."""
        heard = self.servers[connection]
        missing = heard.keys() - {(x.replica, x.rank) for x in statuses}
        gone = [heard.pop(key).status for key in sorted(missing)]
        return [x for x in gone if not self._is_heard(x)]

    def _is_heard(self, last: m.TrainerStatus) -> bool:
        """Whether a connection still has statuses of this rank of this server."""
        others = (statuses.get((last.replica, last.rank)) for statuses in self.servers.values())
        return any(x is not None and x.status.ckpt == last.ckpt for x in others)

    def notify_servers(self, notice: m.EpochNotice) -> None:
        frame = frame_of(notice)
        for connection in self.servers:
            connection.send(frame)

    # --- the end ---------------------------------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        """Close every connection, a few per turn of the loop: the lease must be given back meanwhile."""
        connections = [*self.sessions.values(), *self.servers]
        self.sessions.clear()
        self.servers.clear()
        ends = WorkQueue(_ENDS_PER_TURN)
        for connection in connections:
            ends.add(partial(connection.end, code, reason))


# Writes and reads of a job's record: each is a task whose outcome returns to the core as an event.
#
# After a failed write the core reads the record again. The pause before a read grows with every failure,
# so that a faulty store gets fewer requests.


_RETRY_S = (0.05, 1.0)
_MOST_FAILURES = 10


class RecordTasks:
    """Writes and reads the record of one job, and counts the writes that failed in a row.

    ``asker`` names the driver of the core that ordered the write or read.
    """

    def __init__(self, shell: "Job", context: TermContext, stored: StoredRecord) -> None:
        self._shell = shell
        self._context = context
        self._stored = stored
        self._failures = 0

    def write(self, record: Record, asker: object) -> None:
        """Replace the record; ends in RecordWritten or WriteFailed."""
        self._context.tasks.start(f"write {self._shell.name}", self._write(record, asker))

    def read(self, asker: object) -> None:
        """Read the record; ends in RecordRead."""

        async def answer() -> None:
            self._shell.answer(asker, io.RecordRead(await self._read_stubbornly(asker)))

        self._context.tasks.start(f"read {self._shell.name}", answer())

    async def read_afresh(self) -> Record | None:
        """Return the record for a new core, and forget past failures."""
        self._failures = 0
        return await self._read_stubbornly(None)

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
            self._shell.note("write failed", "", f"epoch {record.epoch}: {why}")
        else:
            self._failures = 0
        self._shell.answer(asker, failed if why else io.RecordWritten(record.nonce))

    async def _read_stubbornly(self, asker: object) -> Record | None:
        """Return the record. Ask the store until it answers or the asker no longer waits."""
        while self._shell.is_asked_by(asker) and not self._context.term.is_over:
            if self._failures:
                await asyncio.sleep(min(_RETRY_S[0] * 2 ** (self._failures - 1), _RETRY_S[1]))
            try:
                return await self._stored.read()
            except (Deposed, ProtocolError) as error:
                self._context.term.resign(f"job {self._shell.name}: {error}")
            except StoreError as error:
                self._failures = min(self._failures + 1, _MOST_FAILURES)
                log.warning("job %s: its record cannot be read: %s", self._shell.name, error)
        return None


# Decides when a complete job may be forgotten, although clocks may be wrong.
#
# The record holds the time of day at which the job ended, by the clock of the leader's host. The present
# leader may be on another host. Either clock may be wrong, and may be corrected at any time.


# If a clock is wrong when its host starts, the retention assumes that it is corrected within a day.
WITNESSED_S = 86400.0


class Retention:
    """The retention of one job in one term. The term began at ``unix_s`` (time of day) and ``now``
    (monotonic)."""

    def __init__(self, unix_s: float, now: float) -> None:
        self._ahead_s = unix_s - now
        self._over_at: float | None = None

    def is_in_use(self) -> None:
        """Note that the job is not complete, or has connections."""
        self._over_at = None

    def is_over(self, ended: float, seconds: float, unix_s: float, now: float) -> bool:
        """Whether ``seconds`` have passed since ``ended`` (Unix seconds; 0: unknown).

        Two clocks must agree: the time of day, and the time of day at the term's start plus the monotonic
        time since. So a clock change has no effect. At least a day without connections (or ``seconds``,
        if that is shorter) must lie in this term, because a clock may be wrong at its host's start."""
        if self._over_at is None:
            self._over_at = now
        since = ended or self._over_at + self._ahead_s
        age_s = min(unix_s, now + self._ahead_s) - since
        return age_s >= seconds and now - self._over_at >= min(seconds, WITNESSED_S)


log = logging.getLogger(__name__)

_REMAKE_S = 1.0
REFUSED = "session refused"  # the kind of the core's event about a session that may not stand
# The messages that every member sends when it gets a new epoch.
_ANSWERS = ('{"kind":"Report"', '{"kind":"Running"')


class Job:
    """Call ``begin`` once; then the methods below bring events. ``close`` ends the job here."""

    def __init__(self, name: str, context: TermContext, stored: StoredRecord, past: JobPast) -> None:
        self.name = name
        self.events = past.events
        self.core = LeaderCore(name, context.config, entropy(), context.clock())
        self.connections = JobConnections()
        self.peer_addresses = PeerAddresses()
        self.history = JobHistory(name, context, stored, past)
        self.servers = CheckpointServers()
        self._context = context
        self.stored = stored
        self._records = RecordTasks(self, context, stored)
        self._driver: Driver[io.Event, io.Effect] | None = None
        self._retention = Retention(time.time(), context.clock())
        self._changed = asyncio.Event()  # set when the record changes, then replaced by a new Event
        self._record: Record | None = None  # the record as this shell last saw it
        self._tensors: tuple[str, ...] = ()  # descriptions of the parameters, shared by all sessions
        self._answers = WorkQueue()
        self._waits = WaitSentence()
        self.slowness = SlownessWatch(self.history.slowdowns.count)
        self.drills = Drills(name, self.note, context.clock)
        self._diagnosis = DiagnosisTask(
            partial(context.access_to, name),
            self.peer_addresses,
            context.tasks,
            lambda kind, about, why, incident_id: self.note(kind, about, why, incident_id=incident_id),
            self.history.keep,
        )

    @property
    def now(self) -> float:
        """The core's clock, monotonic seconds."""
        return self._context.clock()

    @property
    def is_running(self) -> bool:
        """False between a defect in the core and the start of its successor."""
        return self._driver is not None

    @property
    def max_replicas(self) -> int:
        """The most replicas that this lighthouse allows a job."""
        return self._context.max_replicas

    @property
    def is_idle(self) -> bool:
        """Whether the store has nothing of this job, and no process has a connection or a report."""
        is_new = not (self.core.state.record or self.core.writer.writing)
        reports = self.history.recoveries.launches.newest.values()
        return is_new and self.connections.are_none and not any(report.host for report in reports)

    def is_over_since(self, seconds: float, unix_s: float) -> bool:
        """Whether the job was complete ``seconds`` ago, and no process has a connection."""
        record = self.core.state.record
        is_used = not self.connections.are_none or self.core.writer.writing
        if record is None or not record.complete or is_used:
            self._retention.is_in_use()
            return False
        return self._retention.is_over(record.ended, seconds, unix_s, self.now)

    @property
    def gauges(self) -> JobGauges:
        core = self.core
        record, state = core.state.record, recoverable(core, self.now)
        roster = record.roster if record else ()
        absent = self.absences()
        training, wanted = counts(core, absent)
        missing = max(0, wanted - training - sum(absence.state == LEFT for absence in absent))
        ledger, left_by = self.look_at_ledger().seconds, self.history.left_by
        seen = [p.seen for x in roster if (p := core.state.liveness.peers.get(x.replica)) is not None]
        return JobGauges(
            heartbeat_age_seconds=self.now - min(seen, default=self.now),
            ledger=ledger,
            left_by_signal=left_by,
            job_complete=core.state.is_complete,
            job_failed=record is not None and bool(record.failed),
            job=self.name,
            epoch=record.epoch if record else 0,
            steps=core.state.top_step(),
            members=len(record.roster) if record else 0,
            replicas_missing=missing
            if (record or absent) and not (core.state.is_complete or core.endings.refused_for or left_by)
            else 0,
            absent=absent,
            troubles=self._troubles(),
            failures=core.evidence.recent,
            sessions=len(self.connections.sessions),
            recoverable_step=None if state is None else state["step"],
            recoverable_age_seconds=None if state is None else state["age_s"],
            slow_replicas=len(self.slowness.slow),
            slowest_speed=self.slowness.slowest_speed,
            slowdown_s=self.history.slowdowns.total_s,
            slowdowns=dict(self.history.slowdowns.counts),
        )

    def absences(self) -> list[Absence]:
        """Return the replicas that the job misses now."""
        return absences(
            self.core, self.history.recoveries, self.now, self.peer_addresses, self.connections.launchers
        )

    def hosts(self) -> list[HostRow]:
        """Describe the hosts of replicas of several hosts, and each host that stands by once."""
        rows = {
            (host.id, name if host.node != SPARE else SPARE, host.node): replace(host, replica=name)
            for name, nodes in sorted(self.connections.launchers.items())
            for host in nodes.rows(self.now)
        }
        return list(rows.values())

    def _troubles(self) -> list[ReplicaTrouble]:
        """Return the missing hosts, and the troubles of members."""
        record, slow, servers = self.core.state.record, self.slowness.slow, self.servers
        if record is not None and (record.complete or self.history.left_by):
            return []
        kinds = {
            "slow": {name: f"its {slowdown.scope}" for name, slowdown in slow.items()},
            "server silent": dict.fromkeys(sorted(servers.silent), "its trainer runs"),
            "durable failed": servers.failing,
        }
        missing = [
            ReplicaTrouble(host.replica, "host missing", host.host, host.why)
            for host in self.hosts()
            if host.state == "missing"
        ]
        return missing + [
            ReplicaTrouble(name, kind, host_of(member), why)
            for kind, reasons in kinds.items()
            for name, why in reasons.items()
            if record is not None and (member := record.member(name)) is not None
        ]

    def look_at_ledger(self) -> GoodputLedger:
        """Return the goodput ledger, up to now."""
        self.servers.look(self.core, self.now, self.note)
        return self.history.sample(self.core, self.now, keep=self.is_running)

    def begin(self, record: Record | None) -> None:
        """Lead this job from ``record``, which the store holds now."""
        self._record = record
        self.history.begin(record)
        # A counter that begins at 0 shows its first increase.
        self._context.metrics.evicted(self.name, 0)
        self._context.metrics.event(self.name, "launch failed", 0)
        self._driver = Driver(
            self.core, self._perform, tick=io.LeaderTick(), on_crash=self._remake, clock=self._context.clock
        )
        self._feed(io.Elected(self._context.term.store_id, record, time.time()))

    def close(self, code: int, reason: str) -> None:
        """Give the core no more events, and close every connection with ``code``."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        self._changed.set()
        self.connections.close(code, reason)

    # --- members -----------------------------------------------------------------------------------------

    def open(self, connection: MemberConnection, session: m.OpenSession, policy: Policy) -> bool:
        """Open a session, or open it again; return False when the core refused it and it is being closed."""
        record, allowed = self.core.state.record, self.max_replicas
        needed = policy.min_replicas if record is None else 0
        sessions = self.connections.sessions
        reason = no_room(self.name, session.replica, sessions, record, needed, allowed)
        if reason := reason or self.peer_addresses.stranger(session):
            self.note(REFUSED, session.replica, reason)
            self.connections.refuse(connection, reason)
            return False
        asked = self._allowed_policy(session.replica, policy)
        if session.tensors and session.tensors == self._tensors:
            session = replace(session, tensors=self._tensors)
        self._tensors = session.tensors
        connection.replica, connection.incarnation = session.replica, session.incarnation
        connection.accepts_compression = bool(session.roster)
        with self.connections.opening(connection):
            self._feed(io.SessionOpened(session, asked))
        if not self.is_running:
            connection.end(codes.DEFECT, "the lighthouse met a defect of its own: connect again")
            return False
        peer = self.core.state.liveness.peers.get(session.replica)
        if peer is None or peer.session is not session:
            connection.end(codes.REFUSED, "refused")
            return False
        if asked != self.core.state.config.policy:
            self.note("policy kept", session.replica, policy_kept(asked, self.core.state.config.policy))
        self.peer_addresses.session(session, connection.address, is_trusted=connection.is_trusted)
        self.connections.opened(connection)
        self.history.recoveries.launches.attached(session.replica)
        return True

    def _allowed_policy(self, replica: str, policy: Policy) -> Policy:
        """Return the policy that this replica asks for, cut to this lighthouse's limits."""
        allowed, is_first = self.max_replicas, not self.connections.sessions
        start, most = min(policy.start_replicas, allowed), min(policy.max_replicas, allowed)
        if start < policy.start_replicas and is_first:
            why = f"it asked to start with {policy.start_replicas} replicas, this lighthouse allows {allowed}"
            self.note("policy kept", replica, why)
        return replace(policy, max_replicas=most, start_replicas=start)

    def overloaded(self, seconds: float) -> None:
        """Tell the core that some connections to this lighthouse must wait for ``seconds`` more."""
        self._feed(io.AcceptQueueFull(seconds))

    def hear(self, connection: MemberConnection, message: m.MemberMessage) -> None:
        """Take one message of an open session; messages of a replaced session are dropped."""
        if self.connections.is_current(connection):
            self._feed(io.FromMember(connection.replica, connection.incarnation, message))
            if isinstance(message, m.Heartbeat) and message.times is not None and self.is_running:
                self.slowness.checks.take(connection.replica, message.times.measured)
                self.slowness.hear(self.core, connection.replica, connection.incarnation, message)

    def defer(self, text: str, work: Callable[[], object]) -> bool:
        """Queue ``work`` if this text may wait, and return whether it was queued. So the answers of thousands
        of members do not delay heartbeats."""
        if is_deferred := text.startswith(_ANSWERS) and self._is_many:
            self._answers.add(work)
        return is_deferred

    @property
    def _is_many(self) -> bool:
        return len(self.connections.sessions) >= MANY or len(self.connections.servers) >= MANY

    def session_closed(self, connection: MemberConnection) -> None:
        """Note the end of a session's socket."""
        if self.connections.is_current(connection):
            del self.connections.sessions[connection.replica]
            self._feed(io.SessionClosed(connection.replica, connection.incarnation))

    # --- checkpoint servers ------------------------------------------------------------------------------

    def trainer_statuses(self, connection: MemberConnection, statuses: Sequence[m.TrainerStatus]) -> None:
        """Take the statuses of all ranks of a server; the core gets only some of many equal statuses."""
        if self.connections.is_new_server(connection):
            servers, record = len(self.connections.servers), self.core.state.record
            connection.send(frame_of(terms_of(servers)))
            if record is not None:
                connection.send(frame_of(notice_of(record, servers)))
        news = [x for x in statuses if self.connections.is_news(connection, x, self.now)]
        dropped = self.connections.dropped(connection, statuses)
        for status in news:  # a defect in the core may end all connections of the job here
            self.peer_addresses.status(status.replica, status.rank, connection.address)
            self._feed(io.TrainerStatusSeen(status))
        self._close_statuses(dropped)

    def statuses_unchanged(self, connection: MemberConnection) -> None:
        """Take a checkpoint server's word that its last statuses still hold. Raises ProtocolError."""
        heard, now = tuple(self.connections.servers.get(connection, {}).values()), self.now
        if not heard:
            raise ProtocolError("a checkpoint server says first which statuses stay: send a ServerStatus")
        self._feed(io.StatusesUnchanged(tuple(x.status for x in heard), tuple(now - x.fed_at for x in heard)))

    def server_closed(self, connection: MemberConnection) -> None:
        """Note the end of a checkpoint server's connection; the server may already have a new one."""
        self._close_statuses(self.connections.server_closed(connection))

    def _close_statuses(self, statuses: Iterable[m.TrainerStatus]) -> None:
        for status in statuses:
            self._feed(io.TrainerStatusClosed(status.replica, status.ckpt, status.rank))

    # --- launchers ---------------------------------------------------------------------------------------

    def launch_failed(self, report: LaunchReport, attempt: int) -> None:
        """Take a launcher's report, and record it; a replica that has a session again is not absent."""
        last = f'; its last line: "{report.last_line}"' if report.last_line else ""
        why = f"attempt {attempt} on {report.host}: {report.sentence}{last}"
        # Three failed starts are an alert; a launcher that people or a scheduler ended is none.
        self.note("launcher ended" if report.stopped_by else "launch failed", report.replica, why)
        launches, record = self.history.recoveries.launches, self.core.state.record
        if report.replica in self.connections.sessions:
            return
        launches.take(report)
        is_member = record is not None and record.member(report.replica) is not None
        if not (launches.ends_attached(report.replica) or is_member or report.stopped_by):
            self._feed(io.LaunchFailed(report.replica, report.host, report.why))

    def host_replaced(self, replica: str) -> None:
        """Note that the ranks of a replica start, and that one of its hosts is another than before."""
        self._feed(io.HostReplaced(replica))

    def has_only_old_reports(self, seconds: float, unix_s: float) -> bool:
        """Forget the launchers' reports of such an age; return whether nothing of the job is left."""
        launches = self.history.recoveries.launches
        return launches.forget_before(unix_s - seconds) and self.is_idle

    # --- operators ---------------------------------------------------------------------------------------

    def operate(self, asked: io.Operator) -> None:
        """Take an operator's order, and record it with who and why."""
        self.note(f"{asked.action} asked", asked.replica, f"by {asked.who}: {asked.why}{numbers(asked)}")
        self._feed(asked)

    async def overrides_stored(self, within_s: float) -> None:
        """Wait until the store has the operators' overrides. Raises StoreUnavailable if it does not take them
        within ``within_s``, or if this lighthouse leads no longer."""
        core = self.core
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_running and self.core is core and core.writer.has_unwritten_overrides:
                    await self._changed.wait()
        if not self.is_running or self.core is not core or core.writer.has_unwritten_overrides:
            raise StoreUnavailable("the store may not have this command: send it again in a moment")

    # --- events and effects ----------------------------------------------------------------------------

    def _feed(self, event: io.Event) -> None:
        if self._driver is None:
            return
        self._driver.feed(event)
        now, is_new = self._context.clock(), self.core.state.record is not self._record
        if is_new:
            self._changed.set()
            self._changed = asyncio.Event()
            before, self._record = self._record, self.core.state.record
            gone = self._record.gone_since(before) if self._record is not None else []
            if gone:
                self._context.metrics.evicted(self.name, len(gone))
            if self._record is not None:
                # Checkpoint servers log which epoch is in force and why, as the replicas do.
                self.connections.notify_servers(notice_of(self._record, len(self.connections.servers)))
        if is_new or not self._is_many or self.history.is_observation_due(now):
            self._observe()
        if self.history.is_sample_due(len(self.connections.sessions) + len(self.connections.servers), now):
            self.look_at_ledger()
        if self.is_running and self.slowness.is_due(now):
            self._look_at_speeds(now)

    def _look_at_speeds(self, now: float) -> None:
        for change in self.slowness.look(self.core, now):
            self.note(change.kind, change.about, change.why)
        step = self.core.state.highest_step or 0
        slow, slowdowns = self.slowness.parts(), self.history.slowdowns
        self.history.keep_slowdowns(slowdowns.observe(slow, self.events.newest, step, time.time()))
        if (order := self.slowness.remedies.take_order()) is not None:
            self._feed(order)

    def answer(self, asker: object, event: io.Event) -> None:
        """Give an outcome to the core that ordered the write or read, but not to a later core."""
        if self.is_asked_by(asker):
            self._feed(event)

    def is_asked_by(self, asker: object) -> bool:
        """Whether ``asker`` drives the present core; None stands for no core."""
        return self._driver is asker

    def _perform(self, effect: io.Effect) -> None:
        if isinstance(effect, io.SendMember):
            if self._context.term.holds():
                message = self._waits.attach(effect.message, self.core, self._context.clock())
                message = self.slowness.checks.attach(effect.replica, message)
                self.connections.send(effect.replica, effect.incarnation, message)
        elif isinstance(effect, io.WriteRecord):
            self._records.write(effect.record, self._driver)
        elif isinstance(effect, io.ReadRecord):
            self._records.read(self._driver)
        elif isinstance(effect, io.StepDown):
            self._context.term.resign(f"job {self.name}: {effect.reason}")
        elif isinstance(effect, io.RecordEvent):
            self.note(effect.kind, effect.about, effect.why, effect.epoch, effect.incident_id)
            if effect.kind in ("evicting", "aborted"):
                # The effect may come from the driver's tick, during which the core takes no other event.
                asyncio.get_running_loop().call_soon(self._observe)
        else:
            assert_never(effect)

    def _observe(self) -> None:
        """Bring recovery records up to date, and begin diagnoses."""
        if self._driver is None:
            return
        changed = self.history.observe(self.core, self.events.newest, self.now)
        if changed:
            self.look_at_ledger()  # a recovery may end before the next sample of the ledger is due
        self._diagnosis.observe(self.core, changed, self.now)

    def note(self, kind: str, about: str, why: str, epoch: int | None = None, incident_id: str = "") -> None:
        """Record an event for people, count it and log it."""
        core = self.core
        if epoch is None:
            epoch = core.state.record.epoch if core.state.record else 0
        event = self.events.add(kind, epoch, about, why, incident_id)
        self._context.metrics.event(self.name, kind)
        self.history.keep_slowdowns(self.history.slowdowns.note(kind, about, event.why, time.time()))
        if kind == REFUSED and (core.state.record is not None or self.connections.sessions):
            self.history.recoveries.launches.refuse(about, event.why, time.time())
        peer = core.state.liveness.peers.get(about)
        incarnation = peer.incarnation if peer is not None else None
        where = {"job": self.name, "replica": about, "incarnation": incarnation, "epoch": epoch}
        text = ": ".join(filter(None, (kind, about, event.why)))
        # The newest step that the core knows; a search for the highest step would look at every member.
        log.info(
            "%s", text, extra=fields(**where, step=core.state.highest_step or 0, incident_id=incident_id)
        )

    # --- a defect --------------------------------------------------------------------------------------

    def _remake(self, error: BaseException) -> None:
        log.error("job %s: a defect in its leader; it is made again", self.name, exc_info=error)
        self.note("defect", "", f"{type(error).__name__}: {error}")
        self.close(codes.DEFECT, "the lighthouse met a defect of its own: connect again")
        self._context.tasks.start(f"remake {self.name}", self._begin_again())

    async def _begin_again(self) -> None:
        await asyncio.sleep(_REMAKE_S)
        record = await self._records.read_afresh()
        if self._driver is None and self._context.term.in_force():
            self.core = LeaderCore(self.name, self._context.config, entropy(), self._context.clock())
            self.begin(record)
