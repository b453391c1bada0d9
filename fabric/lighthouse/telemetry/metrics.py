"""Metrics for Prometheus: counts of decisions and store writes, and values that every scrape reads.

A registry of its own keeps metrics of the process and of other libraries out.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.health.localise import Scope
from fabric.lighthouse.history.recovery import DOWN, NAMED, Absence, RecoveryRecord
from fabric.model import HostFailure
from fabric.runtime.http.connection_limit import ConnectionLimit, ConnectionMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WRITE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "fabric_lighthouse_"


@dataclass(frozen=True, slots=True)
class ReplicaTrouble:
    """A trouble of one member. ``why`` does not change while the trouble lasts."""

    replica: str
    kind: str  # "slow", "server silent" or "durable failed"
    host: str
    why: str


def _gauge(text: str, default: float | None = 0) -> Any:
    """Return the field of a gauge that has the field's name; ``text``: its description."""
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True, slots=True)
class JobGauges:
    """The present values of one job. A gauge is left out while its value is None."""

    job: str
    sessions: int = _gauge("Open sessions of trainers.")
    members: int = _gauge("Members of the roster.")
    replicas_missing: int = _gauge("Replicas fewer than the job wants.")
    epoch: int = _gauge("The epoch in force.")
    steps: int = _gauge("The highest committed step.")
    recoverable_step: int | None = _gauge("Step of the freshest recoverable state.", None)
    recoverable_age_seconds: float | None = _gauge("Age of the freshest recoverable state.", None)
    heartbeat_age_seconds: float = _gauge("Since the member that has been silent for longest was heard.")
    job_complete: bool = _gauge("1 when the job has finished.")
    job_failed: bool = _gauge("1 while the job waits for a person to mend it.")
    left_by_signal: int = _gauge(
        "The signal that has ended all launchers, 2 for Ctrl-C; 0 for a job that may train."
    )
    slow_replicas: int = _gauge(
        "Replicas that are slow, or whose link to the next replica is; 1 where the whole job is slow."
    )
    slowest_speed: float = _gauge(
        "Speed of the slowest replica relative to its equals; 1 where none is slow.", 1
    )
    absent: Sequence[Absence] = ()
    ledger: Mapping[str, float] = field(default_factory=dict)  # seconds by state
    troubles: Sequence[ReplicaTrouble] = ()
    failures: Sequence[HostFailure] = ()  # that count for a penalty now
    slowdown_s: float = 0.0  # seconds by which slow replicas have made steps longer
    slowdowns: Mapping[str, int] = field(default_factory=dict)  # scope -> number of slowdowns


class LighthouseMetrics:
    """The metrics of this process; ``render`` gives the text for a scrape."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.connections = ConnectionLimit()
        registry.register(ConnectionMetrics(_PREFIX + "http_", self.connections))
        self._events = Counter(
            _PREFIX + "events", "Events of jobs, by kind.", ["job", "kind"], registry=registry
        )
        self._evictions = Counter(
            _PREFIX + "evictions", "Members left out of a forced epoch.", ["job"], registry=registry
        )
        self._record_writes = Counter(
            _PREFIX + "record_writes", "Writes of a job's record.", ["job", "outcome"], registry=registry
        )
        self._writes = Counter(
            _PREFIX + "store_writes", "Writes to the store.", ["what", "outcome"], registry=registry
        )
        self._takes_writes = Gauge(
            _PREFIX + "store_takes_writes",
            "0 while the store refuses writes, as a full one.",
            registry=registry,
        )
        self._takes_writes.set(1.0)
        self._write_seconds = Histogram(
            _PREFIX + "store_write_seconds",
            "How long the store took for a write.",
            registry=registry,
            buckets=_WRITE_BUCKETS_S,
        )

        self._recovery_seconds = Histogram(
            _PREFIX + "recovery_seconds",
            "From the detection of a failure to each of its phases, seen here.",
            ["job", "phase"],
            registry=registry,
            buckets=_RECOVERY_BUCKETS_S,
        )
        self._told: set[tuple[str, int, str]] = set()

    def observe(self, is_leader: Callable[[], bool], jobs: Callable[[], Iterable[JobGauges]]) -> None:
        """Set, once, the functions that every scrape calls."""
        self._registry.register(_Gauges(is_leader, jobs))

    def watch_writes(self, are_taken: Callable[[], bool]) -> None:
        """Set, once, the function that says whether the store takes writes."""
        self._takes_writes.set_function(lambda: float(are_taken()))

    def event(self, job: str, kind: str, count: int = 1) -> None:
        self._events.labels(job, kind).inc(count)

    def evicted(self, job: str, count: int) -> None:
        self._evictions.labels(job).inc(count)

    def recovery(self, job: str, recovery: RecoveryRecord) -> None:
        """Count each phase of a recovery once, when it is first known."""
        phases = {
            "epoch_committed": recovery.epoch_committed,
            "links_up": recovery.links_up,
            "step_committed": recovery.step_committed,
        }
        for replica, back in recovery.lost.items():
            phases[f"joined {replica}"] = back.joined
        for phase, at in phases.items():
            if at and (job, recovery.id, phase) not in self._told:
                self._told.add((job, recovery.id, phase))
                seconds = max(0.0, at - recovery.detected)
                self._recovery_seconds.labels(job, phase.partition(" ")[0]).observe(seconds)
        if not recovery.is_open:
            self._told = {phase_key for phase_key in self._told if phase_key[:2] != (job, recovery.id)}

    def record_write(self, job: str, outcome: str, duration_s: float) -> None:
        self._record_writes.labels(job, outcome).inc()
        self._writes.labels("record", outcome).inc()
        self._write_seconds.observe(duration_s)

    def election_write(self, outcome: str) -> None:
        self._writes.labels("election", outcome).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Reads the state at the time of the scrape."""

    def __init__(self, is_leader: Callable[[], bool], jobs: Callable[[], Iterable[JobGauges]]) -> None:
        self._is_leader = is_leader
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        leader = GaugeMetricFamily(_PREFIX + "is_leader", "1 while this process leads.")
        leader.add_metric([], float(self._is_leader()))
        yield leader
        jobs = list(self._jobs())
        for gauge in fields(JobGauges):
            if "text" in gauge.metadata:
                family = GaugeMetricFamily(_PREFIX + gauge.name, gauge.metadata["text"], labels=["job"])
                for job in jobs:
                    if (value := getattr(job, gauge.name)) is not None:
                        family.add_metric([job.job], float(value))
                yield family
        yield _labelled(
            "replica_down",
            f"1 for each lost replica without a live process, {NAMED} at most; why is the reason.",
            ["replica", "host", "why"],
            # A member's reason may change with the time, and a new label would be a new series.
            {job.job: [x for x in job.absent if x.state == DOWN and not x.is_member] for job in jobs},
        )
        yield _labelled(
            "replica_troubled",
            f"1 for each trouble of a member, {NAMED} per job at most: slow, server silent, durable failed.",
            ["replica", "kind", "host", "why"],
            {job.job: job.troubles for job in jobs},
        )
        yield _labelled(
            "replica_failures",
            f"Failures that count for a penalty now, by replica and host; {NAMED} per job at most.",
            ["replica", "host"],
            {job.job: job.failures for job in jobs},
        )
        ledger = CounterMetricFamily(
            _PREFIX + "job_seconds",
            "The job's time by state: training, degraded, recovering, stalled.",
            labels=["job", "state"],
        )
        for job in jobs:
            for state, seconds in job.ledger.items():
                ledger.add_metric([job.job, state], seconds)
        yield ledger
        yield from _slowdowns(jobs)


def _labelled(name: str, text: str, labels: list[str], rows: Mapping[str, Sequence[object]]) -> Metric:
    """Return a gauge with the first NAMED ``rows`` of each job; equal rows are counted."""
    family = GaugeMetricFamily(_PREFIX + name, text, labels=["job", *labels])
    for job, of_job in rows.items():
        counts = Counts(tuple(str(getattr(row, label)) for label in labels) for row in of_job)
        for values, count in counts.most_common(NAMED):
            family.add_metric([job, *values], count)
    return family


def _slowdowns(jobs: list[JobGauges]) -> Iterator[Metric]:
    cost = CounterMetricFamily(
        _PREFIX + "slowdown_seconds",
        "Seconds by which slow replicas have made steps longer, an estimate.",
        labels=["job"],
    )
    counts = CounterMetricFamily(
        _PREFIX + "slowdowns",
        "Slowdowns by what was slow: rank, stage, link, replica, job.",
        labels=["job", "scope"],
    )
    for job in jobs:
        cost.add_metric([job.job], job.slowdown_s)
        for scope in Scope:  # a counter that begins at 0 shows its first increase
            counts.add_metric([job.job, scope], job.slowdowns.get(scope, 0))
    yield cost
    yield counts
