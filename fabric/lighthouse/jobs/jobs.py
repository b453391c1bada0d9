"""All jobs of this lighthouse, made from their records when it is elected, and dropped when its term ends.

A job exists here from its first session or status on, and in the store from its first epoch on. The logs of
events outlive a term, so that they survive a short fault of the store.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from fabric.errors import ProtocolError, Refused, StoreError, StoreUnavailable
from fabric.lighthouse.connections import connection as codes
from fabric.lighthouse.connections.connection import LayoutReader
from fabric.lighthouse.connections.validation import MAX_REPLICAS, check_name
from fabric.lighthouse.diagnosis.rank_probe import ProbeAccess
from fabric.lighthouse.election import Commit, Term
from fabric.lighthouse.jobs.job import Job
from fabric.lighthouse.jobs.job_history import JobPast, StoredRecord, TermContext, job_of, records_prefix
from fabric.lighthouse.telemetry import JobGauges, LighthouseMetrics, Traces
from fabric.model import Record, Value, counted
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.messages import wire
from fabric.runtime.tasks import Tasks
from fabric.store.base import KeyValue, Store

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_LOOK_S = 60.0


class Quotas(Value):
    """The most ``jobs`` that are not complete, and the most ``replicas`` of each. ``retain_s``: how long a
    complete job's record is kept; from it late replicas learn that the job is complete."""

    jobs: int = 4096
    replicas: int = MAX_REPLICAS
    retain_s: float = 7 * 86400.0


_USUAL = Quotas()


class Jobs:
    """The election calls ``begin`` and ``end``. ``loaded`` is set while requests can be answered. ``commit``
    writes records; by default it is the store's own."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        config: LeaderConfig,
        metrics: LighthouseMetrics,
        tasks: Tasks,
        access_to: Callable[[str, bool], ProbeAccess] = lambda _job, _with_own: ProbeAccess(),
        quotas: Quotas = _USUAL,
        commit: Commit | None = None,
    ) -> None:
        self.by_name: dict[str, Job] = {}
        self.unreadable: dict[str, str] = {}
        self.loaded = asyncio.Event()
        self.layouts = LayoutReader()
        self._store = store
        self._namespace = namespace
        self._config = config
        self._quotas = quotas
        self._tasks = tasks
        self._term_context = partial(
            TermContext,
            store=store,
            commit=commit or store.commit,
            namespace=namespace,
            config=config,
            metrics=metrics,
            tasks=tasks,
            access_to=access_to,
            max_replicas=quotas.replicas,
        )
        self.traces: Traces | None = None
        self.on_end: Callable[[str], None] = lambda _reason: None  # called while the jobs are still led
        self._context: TermContext | None = None
        self._past: dict[str, JobPast] = {}

    def begin(self, term: Term) -> None:
        """Begin to lead: read every record and lead its job."""
        self._context = self._term_context(term, traces=self.traces)
        self._tasks.start("load the jobs", self._load(self._context))
        self._tasks.start("forget old jobs", self._forget_old(self._context))

    def end(self, reason: str) -> None:
        """Stop leading: close every job."""
        self.on_end(reason)
        self._context = None
        self.loaded.clear()
        for job in self.by_name.values():
            job.close(codes.NOT_THE_LEADER, f"not the leader: {reason}")
        self.by_name.clear()
        self.unreadable.clear()
        for past in self._past.values():
            past.events.end_followers()

    @property
    def leads(self) -> bool:
        """Whether the lease is in force; if it may have ended, end the term."""
        return self._context is not None and self._context.term.holds()

    def find(self, name: str) -> Job | None:
        """Return the job of that name, if any. Raises ProtocolError for a bad name, Refused when its record
        cannot be read."""
        check_name("job", name)
        if name in self.unreadable:
            raise Refused(self.unreadable[name])
        return self.by_name.get(name)

    def find_or_make(self, name: str) -> Job:
        """Return the job of that name, or a new one. Raises as ``find`` does, and StoreUnavailable when this
        lighthouse does not lead."""
        job = self.find(name)
        if job is not None:
            return job
        if self._context is None or not self.loaded.is_set():
            raise StoreUnavailable("this lighthouse does not lead now: connect again")
        if sum(not job.core.state.is_complete for job in self.by_name.values()) >= self._quotas.jobs:
            raise Refused(
                f"job {name} is not taken: this lighthouse leads {counted(self._quotas.jobs, 'job')}, as "
                "many as it may; wait until one is complete, or have --limit max-jobs raised"
            )
        return self._make(self._context, name, None, 0)

    def release(self, job: Job) -> None:
        """Forget a job without a record and without connections."""
        if job.is_idle:
            self._drop(job, "no replica takes part in this job")

    def _drop(self, job: Job, why: str) -> None:
        if self.by_name.get(job.name) is job:
            job.close(codes.NOT_THE_LEADER, why)
            del self.by_name[job.name]
            self._past.pop(job.name).events.end_followers()

    def token_refused(self, name: str, address: str) -> None:
        """Note that a process at this address has shown a wrong token for a job, if there is such a job."""
        if (job := self.by_name.get(name)) is not None:
            job.peer_addresses.token_refused(address)

    def overloaded(self, seconds: float) -> None:
        """Tell every job that some connections must wait for ``seconds`` more; of which job is unknown."""
        for job in self.by_name.values():
            job.overloaded(seconds)

    @property
    def are_calm(self) -> bool:
        """Whether no job's epoch is about to change."""
        return not any(job.core.writer.is_changing for job in self.by_name.values())

    @property
    def start_wait_s(self) -> float:
        """How long a job waits for all of its replicas; sessions bring the rest of the policy."""
        return self._config.policy.start_wait_s

    def gauges(self) -> Iterator[JobGauges]:
        """Return the gauges of every job."""
        return (job.gauges for job in self.by_name.values())

    async def _load(self, context: TermContext) -> None:
        entries: list[KeyValue] | None = None
        while entries is None and not context.term.is_over:
            try:
                entries, _ = await self._store.list(records_prefix(self._namespace))
            except StoreError as error:
                log.warning("the jobs' records cannot be read yet: %s", error)
                await asyncio.sleep(_RETRY_S)
        if self._context is not context:
            return
        for entry in entries or ():
            if not (name := job_of(self._namespace, entry.key)):
                continue
            try:
                check_name("job", name)
                record = wire.decode_record(entry.value)
            except ProtocolError as error:
                self.unreadable[name] = f"the key {entry.key} holds no record that can be read: {error}"
                log.error("job %s is not led: %s", name, self.unreadable[name])
            else:
                self._make(context, name, record, entry.mod_revision)
        self.loaded.set()

    # --- jobs that are over ----------------------------------------------------------------------------

    async def _forget_old(self, context: TermContext) -> None:
        """Delete the keys of jobs that were complete ``retain_s`` ago and have no connections."""
        retain_s = self._quotas.retain_s
        while not context.term.is_over:
            await asyncio.sleep(min(_LOOK_S, max(retain_s / 10, 0.05)))
            for job in [x for x in self.by_name.values() if x.is_over_since(retain_s, time.time())]:
                try:
                    if self._context is context and await job.stored.delete():
                        self._drop(job, "the job was complete for long and is forgotten")
                        log.info("job %s: complete for %g s, and forgotten now", job.name, retain_s)
                except StoreError as error:
                    log.warning("job %s: its record cannot be deleted yet: %s", job.name, error)
            for job in list(self.by_name.values()):
                if job.has_only_old_reports(retain_s, time.time()):
                    self.release(job)

    def _make(self, context: TermContext, name: str, record: Record | None, revision: int) -> Job:
        stored = StoredRecord(context, name, revision)
        # Read the record from the store, because another leader may have changed the record meanwhile.
        past = self._past.setdefault(name, JobPast())
        job = self.by_name[name] = Job(name, context, stored, past)
        if record is not None:
            job.history.load()
        job.begin(record)
        if record is not None:
            job.look_at_ledger()
        return job
