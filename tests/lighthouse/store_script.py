"""Plays two lighthouses, three members and a store with one failing operation, in an event loop whose clock
leaps.

Election, records and jobs are the real classes; the store is the one in memory. No task waits for real time:
when no task can run, the clock leaps to the next timer.
"""

import asyncio
import selectors
from dataclasses import dataclass, field

from memory_store import MemorySpace, MemoryStore

from fabric.errors import FabricError, StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.connections.connection import MemberConnection
from fabric.lighthouse.election import Election, ElectionHooks, Term
from fabric.lighthouse.jobs.job_history import record_key
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.lighthouse.telemetry import LighthouseMetrics
from fabric.model import DataPlan, Policy, Record
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.runtime.tasks import Tasks
from fabric.store.base import Put

LEASE_S = 5.0
REPLICAS = ("r0", "r1", "r2")
RECORD = record_key("ns", "job")
ELECTION = "/fabric/ns/election/"
_PERIOD_S = 0.25
_LATE_S = 12.0


class _Selector(selectors.DefaultSelector):
    """A selector that never waits, but returns the requested time."""

    leapt = 0.0

    def select(self, timeout: float | None = None) -> list:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nobody has anything left to do"
            self.leapt += timeout + 1e-6 if timeout > 0 else 0.0
        return found


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _Selector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return 1000.0 + self._leaping.leapt


@dataclass
class Fault:
    """A fault of operation ``number`` (from 1), counted over all handles, and only over operations named
    ``of`` if given. ``cut``: the handle does not reach the store for a while, and its requests of that time
    arrive together.
    """

    number: int
    kind: str
    of: str = ""
    seen: list[str] = field(default_factory=list)
    cut: tuple[object, float] | None = None  # the handle that is cut off, and the time until which


KINDS = ("refused", "unreachable", "lost answer", "lost", "late", "very late", "slow", "cut")


class FaultyStore(MemoryStore):
    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world.space)
        self._world, self.name = world, name

    async def get(self, key):
        return await self._do(f"get {key}", lambda: self.space.get(key))

    async def list(self, prefix):
        return await self._do(f"list {prefix}", lambda: self.space.find(prefix))

    async def commit(self, compares, operations):
        return await self._do(f"commit {operations[0].key}", lambda: self._apply(compares, operations))

    async def grant_lease(self, ttl_s):
        return await self._do("grant", lambda: self.space.grant(ttl_s))

    async def keep_alive(self, lease_id):
        return await self._do("keep alive", lambda: self.space.keep_alive(lease_id))

    async def revoke(self, lease_id):
        return await self._do("revoke", lambda: self.space.end_lease(lease_id))

    def _apply(self, compares, operations):
        revision = self.space.commit(compares, operations)
        if revision is not None:
            self._world.applied(self.name, operations)
        return revision

    async def _do(self, what, work):
        fault, loop = self._world.fault, asyncio.get_running_loop()
        # The candidates look at the queue and the leader at its key again and again: a few looks are enough.
        is_again = ELECTION in what and "commit" not in what and fault.seen.count(what) >= 4
        fault.seen.extend([] if is_again else [what])
        count = fault.seen.count(fault.of) if fault.of else len(fault.seen)
        kind = fault.kind if count == fault.number and fault.of in ("", what) and not is_again else ""
        if kind == "cut":
            fault.cut = self, loop.time() + _LATE_S
        if fault.cut is not None and fault.cut[0] is self and (left := fault.cut[1] - loop.time()) > 0:
            # The write reaches the store even if the caller has given up before.
            return await asyncio.shield(self._world.later(left, work))
        if kind == "refused":
            raise StoreError("the disk is full")
        if kind == "unreachable":
            raise StoreUnavailable("the store has no leader")
        if kind == "lost":
            raise StoreIndefinite("the connection was lost")
        if kind == "lost answer":
            work()
            raise StoreIndefinite("the connection was lost")
        if kind in ("late", "very late"):
            self._world.later(0.02 if kind == "late" else _LATE_S, work)
            raise StoreIndefinite("no answer in time")
        if kind == "slow":
            await asyncio.sleep(2.0)
        return work()


class _Socket:
    """Both ends of a connection: what ``MemberConnection`` writes goes to the member."""

    def __init__(self, member: "Member", lighthouse: "Lighthouse") -> None:
        self._member, self._lighthouse = member, lighthouse

    def write(self, frame: bytes) -> None:
        head = {126: 4, 127: 10}.get(frame[1], 2)
        self._member.told(self._lighthouse, wire.decode(frame[head:]))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    async def close(self, code: int, message: bytes) -> None:
        pass


class Member:
    """A member that answers epochs until it has entered their first round."""

    def __init__(self, world: "World", replica: str) -> None:
        self._world, self.replica = world, replica
        self.newest: Record | None = None
        self.runs_in = 0
        self.dies = False
        self._inbox: list[m.LeaderMessage] = []

    def told(self, lighthouse: "Lighthouse", message: m.LeaderMessage) -> None:
        if isinstance(message, m.Epoch | m.RosterDelta):
            self._world.announced(lighthouse, message.record)
        self._inbox.append(message)

    async def live(self) -> None:
        while not self.dies:
            lighthouse = next((x for x in self._world.lighthouses if x.serves), None)
            if lighthouse is not None:
                await self._speak(lighthouse)
            await asyncio.sleep(_PERIOD_S)

    async def _speak(self, lighthouse: "Lighthouse") -> None:
        socket = _Socket(self, lighthouse)
        connection = MemberConnection(socket, socket)
        self._inbox = []
        job = lighthouse.jobs.find_or_make("job")
        if not job.open(connection, self._session(), Policy(start_replicas=len(REPLICAS))):
            return
        beats = 0
        while not connection.is_ending:
            for message in self._inbox:
                self._answer(job, connection, message)
            self._inbox = []
            if self.dies and self.newest is not None:
                job.hear(connection, m.CannotContinue(self.newest.fence, "its process ends"))
                job.session_closed(connection)
                connection.forget()
            elif self.newest is not None:
                beats, fence = beats + 1, self.newest.fence
                beat = m.Heartbeat(beats, fence.epoch, fence.generation, self.newest.base.step, phase="run")
                job.hear(connection, beat)
            await asyncio.sleep(_PERIOD_S)
        job.session_closed(connection)

    def _session(self) -> m.OpenSession:
        held = self.newest.fence if self.newest is not None else None
        return m.OpenSession(
            replica=self.replica,
            incarnation=1,
            generation=held.generation if held is not None else 0,
            step=0,
            digest="",
            epoch=held.epoch if held is not None else 0,
            link=f"{self.replica}.test:9000",
            ckpt=f"http://{self.replica}.test:9999",
            micro_batches=6,
        )

    def _answer(self, job, connection, message: m.LeaderMessage) -> None:
        if isinstance(message, m.Epoch | m.RosterDelta):
            self.newest = message.record
            fence = message.record.fence
            if self.runs_in == fence.epoch:
                job.hear(connection, m.Running(fence, message.record.base.step))
            else:
                report = m.Report(fence, fence.generation, 0, "", 0, 0, (), False, "", (), DataPlan(4))
                job.hear(connection, report)
        elif isinstance(message, m.Resume):
            self.runs_in = message.fence.epoch
            job.hear(connection, m.Running(message.fence, message.step))


class Lighthouse:
    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.store = FaultyStore(world, name)
        self.tasks = Tasks(lambda task, error: world.violations.append(f"{task} died: {error!r}"))
        metrics = LighthouseMetrics()

        def elected(term: Term) -> None:
            world.terms.append(name)
            self.jobs.begin(term)

        config = LeaderConfig(liveness=LivenessConfig(silence_s=4.0))
        self.jobs = Jobs(self.store, "ns", config, metrics, self.tasks)
        hooks = ElectionHooks(elected, self.jobs.end, lambda _: None, metrics.election_write)
        clock = asyncio.get_running_loop().time
        self.election = Election(self.store, "ns", LEASE_S, hooks, clock=clock)

    @property
    def leads(self) -> bool:
        return self.election.term is not None and self.election.term.in_force()

    @property
    def serves(self) -> bool:
        return self.leads and self.jobs.loaded.is_set()

    def begin(self) -> None:
        self.tasks.start("election", self.election.run(f"http://{self.name}.test"))


class World:
    """The run, with the checks that must hold at every moment."""

    def __init__(self, fault: Fault) -> None:
        self.fault = Fault(0, "")
        self._after_start = fault
        self.space = MemorySpace(clock=asyncio.get_running_loop().time)
        self.violations: list[str] = []
        self.records: list[Record] = []  # the records in the order of their commits
        self.terms: list[str] = []  # the leaders, in order
        self._late: set[asyncio.Task] = set()
        self.lighthouses = [Lighthouse(self, name) for name in ("first", "second")]
        self.members = [Member(self, replica) for replica in REPLICAS]

    def later(self, seconds: float, work) -> "asyncio.Task":
        async def wait():
            await asyncio.sleep(seconds)
            return work()

        def ended(task: asyncio.Task) -> None:
            self._late.discard(task)
            if not task.cancelled() and not isinstance(task.exception(), FabricError | None):
                self.violations.append(f"{task.exception()!r}")

        task = asyncio.get_running_loop().create_task(wait())
        self._late.add(task)
        task.add_done_callback(ended)
        return task

    def applied(self, name: str, operations) -> None:
        """Check a transaction of lighthouse ``name`` that the store has applied."""
        if operations[0].key.startswith((ELECTION, "/fabric/store-id")):
            return
        line = sorted(self.space.find(ELECTION)[0], key=lambda kv: kv.create_revision)
        writer = next(x for x in self.lighthouses if x.name == name)
        if not line or writer.election.me.id.encode() not in line[0].value:
            self.violations.append(f"the {name} lighthouse wrote {operations[0].key} after its term")
        for operation in operations:
            if operation.key == RECORD:
                assert isinstance(operation, Put)
                record = wire.decode_record(operation.value)
                if self.records and record.epoch < self.records[-1].epoch:
                    self.violations.append(f"epoch {record.epoch} follows {self.records[-1].epoch}")
                self.records.append(record)

    def announced(self, lighthouse: Lighthouse, record: Record) -> None:
        known = [
            x for x in self.records if (x.fence, x.nonce, x.base) == (record.fence, record.nonce, record.base)
        ]
        # A delta has no roster of its own.
        if not any(not record.roster or x.roster == record.roster for x in known):
            self.violations.append(f"epoch {record.epoch} was announced before it was committed")
        if not lighthouse.leads:
            self.violations.append(f"{lighthouse.name} announced epoch {record.epoch} and does not lead")
        if sum(x.leads for x in self.lighthouses) > 1:
            self.violations.append("two lighthouses believe to lead at once")

    async def run(self) -> None:
        """Run a job of three members in which r0 dies and the other two go on."""
        for lighthouse in self.lighthouses:
            await lighthouse.store.connect()
        self.fault = self._after_start
        for lighthouse in self.lighthouses:
            lighthouse.begin()
            await asyncio.sleep(0.01)
        living = [asyncio.create_task(member.live()) for member in self.members]
        try:
            await self._script()
        finally:
            for task in living:
                task.cancel()
            await asyncio.gather(*living, return_exceptions=True)
            for lighthouse in self.lighthouses:
                await lighthouse.tasks.close()

    async def _script(self) -> None:
        await self._until(lambda: self._run_together(REPLICAS), "the start of all three")
        self.members[0].dies = True
        await self._until(lambda: self._run_together(REPLICAS[1:]), "the epoch without r0")
        await asyncio.sleep(2 * _LATE_S)  # let writes under way reach the store
        await self._until(lambda: self._run_together(REPLICAS[1:]), "still the epoch without r0")

    def _run_together(self, replicas: tuple[str, ...]) -> bool:
        """Return whether these are the members of the committed record and run in its epoch."""
        if not self.records or self.records[-1].names != replicas:
            return False
        running = [x for x in self.members if x.replica in replicas]
        return {x.runs_in for x in running} == {self.records[-1].epoch}

    async def _until(self, holds, what: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + 120.0
        while not holds():
            assert loop.time() < end, f"{what} never came: {self.violations or 'no violation'}"
            await asyncio.sleep(_PERIOD_S)
