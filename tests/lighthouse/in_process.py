"""A lighthouse in the test's own event loop, with real HTTP, and with clocks and a store that the test
controls.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from memory_store import MemorySpace, MemoryStore

from fabric.errors import StoreError
from fabric.lighthouse.connections.connection import AdmissionQueue
from fabric.lighthouse.election import Candidate, Election, ElectionHooks, StoreProbe
from fabric.lighthouse.http.routes import LighthouseParts, make_app
from fabric.lighthouse.http.tokens import Tokens
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.lighthouse.telemetry import LighthouseMetrics
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.runtime.http.http_service import serve
from fabric.runtime.system_calls import seconds_since_boot
from fabric.runtime.tasks import Tasks
from fabric.store.base import Compare, Operation, Store

# Test members send few heartbeats, and the machine may be loaded: silence must not evict them.
PATIENT = LivenessConfig(silence_s=60.0)


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class TroubledStore(MemoryStore):
    """The store in memory, whose next writes of records fail as the test says."""

    def __init__(self, space: MemorySpace) -> None:
        super().__init__(space)
        self.lost_before: list[StoreError] = []  # errors to raise without applying the write
        self.lost_after: list[StoreError] = []  # errors to raise after applying the write
        self.unreadable: list[StoreError] = []
        self.down: StoreError | None = None

    async def get(self, key):
        self._check()
        if self.unreadable and key.endswith("/record"):
            raise self.unreadable.pop(0)
        return await super().get(key)

    async def list(self, prefix: str):
        self._check()
        return await super().list(prefix)

    async def keep_alive(self, lease_id: int) -> float:
        self._check()
        return await super().keep_alive(lease_id)

    async def grant_lease(self, ttl_s: float):
        self._check()
        return await super().grant_lease(ttl_s)

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        self._check()
        is_record = operations and operations[0].key.endswith("/record")
        if is_record and self.lost_before:
            raise self.lost_before.pop(0)
        revision = await super().commit(compares, operations)
        if is_record and self.lost_after:
            raise self.lost_after.pop(0)
        return revision

    def _check(self) -> None:
        if self.down is not None:
            raise self.down


@dataclass
class Instance:
    """One lighthouse. One lighthouse; ``deaths`` lists its tasks that ended by an exception, which is always
    a defect.
    """

    url: str
    parts: LighthouseParts
    store: Store
    deaths: list[BaseException] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    followed: list[Candidate] = field(default_factory=list)

    @property
    def jobs(self) -> Jobs:
        return self.parts.jobs

    @property
    def election(self) -> Election:
        return self.parts.election


@asynccontextmanager
async def lighthouse_on(
    store: Store,
    *,
    lease_s: float = 5.0,
    lease_store: Store | None = None,
    clock: Callable[[], float] = seconds_since_boot,
    liveness: LivenessConfig = PATIENT,
    admissions: AdmissionQueue | None = None,
    tokens: Tokens | None = None,
) -> AsyncIterator[Instance]:
    """Start a lighthouse on ``store``; at the end check that none of its tasks has died."""
    deaths: list[BaseException] = []
    tasks = Tasks(lambda name, error: deaths.append(error))
    metrics = LighthouseMetrics()
    await store.connect()
    jobs = Jobs(store, "ns", LeaderConfig(liveness=liveness), metrics, tasks)
    lost: list[str] = []
    followed: list[Candidate] = []

    def end(reason: str) -> None:
        lost.append(reason)
        jobs.end(reason)

    hooks = ElectionHooks(jobs.begin, end, followed.append, metrics.election_write)
    election = Election(store, "ns", lease_s, hooks, lease_store=lease_store, clock=clock)
    probe = StoreProbe(store, election.prefix, "etcd://s1:2379", every_s=0.0)
    parts = LighthouseParts(election, jobs, metrics, probe, admissions or AdmissionQueue())
    metrics.observe(lambda: parts.leads, jobs.gauges)
    app = make_app(parts, tokens)
    runner, port = await serve(app, "127.0.0.1", 0, shutdown_s=0.5, cancel_abandoned=True)
    url = f"http://127.0.0.1:{port}"
    tasks.start("election", election.run(url))
    try:
        yield Instance(url, parts, store, deaths, lost, followed)
    finally:
        await tasks.close()
        await runner.cleanup()
        await store.close()
        assert not deaths
