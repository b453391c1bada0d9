"""Metrics for Prometheus, and recoveries as traces for OpenTelemetry.

The metrics are counts of decisions and store writes, and values that every scrape reads.

A registry of its own keeps metrics of the process and of other libraries out.
"""

import hashlib
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.errors import ConfigError
from fabric.health.localise import Scope
from fabric.lighthouse.history.recovery import CAPACITY, DOWN, NAMED, Absence, RecoveryRecord
from fabric.model import HostFailure, Value
from fabric.runtime.http.http_service import ConnectionMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WRITE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "fabric_lighthouse_"


class ReplicaTrouble(Value):
    """A trouble of one replica. ``why`` does not change while the trouble lasts."""

    replica: str
    kind: str  # "slow", "server silent", "durable failed" or "host missing"
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
        self.connections = ConnectionMetrics(registry, _PREFIX + "http_").limit

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self._events = counter("events", "Events of jobs, by kind.", "job", "kind")
        self._evictions = counter("evictions", "Members left out of a forced epoch.", "job")
        self._record_writes = counter("record_writes", "Writes of a job's record.", "job", "outcome")
        self._writes = counter("store_writes", "Writes to the store.", "what", "outcome")
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
        phases = {name: getattr(recovery, name) for name in ("epoch_committed", "links_up", "step_committed")}
        phases |= {f"joined {replica}": back.joined for replica, back in recovery.lost.items()}
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
            f"1 for each trouble of a replica, {NAMED} per job at most: slow, server silent, durable failed, "
            "host missing.",
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


# Sends each recovery as an OpenTelemetry trace: an optional extra, off by default.
#
# A complete recovery record becomes a trace, with the record's times. A thread of the SDK sends the trace,
# and no task waits for it. If the collector does not answer, only the trace is lost. The trace id depends
# only on the record, not on the lighthouse that sends it.


_NS = 1_000_000_000


class Traces:
    """Sends traces to the collector at ``url`` (base URL of OTLP over HTTP) until ``close``. Raises
    ConfigError if the extra is not installed."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f'the collector "{url[:200]}" is no URL: give one such as http://host:4318')
        try:
            # Import OpenTelemetry here, because a lighthouse without traces does not need its packages.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces need OpenTelemetry ({error}): pip install 'ckpt-fabric[otel]', or leave --otlp out"
            ) from error
        self._ids = _Ids()
        resource = Resource.create({"service.name": "fabric-lighthouse"})
        ids: Any = self._ids  # has the methods of the SDK's IdGenerator, which may not be installed
        self._provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fabric.lighthouse")
        self._sent: deque[tuple[str, int]] = deque(maxlen=16 * CAPACITY)

    def recovery(self, job: str, recovery: RecoveryRecord) -> None:
        """Send the recovery once, when it is complete and its diagnosis has ended."""
        if recovery.is_open or recovery.diagnosis is None or (job, recovery.id) in self._sent:
            return
        self._sent.append((job, recovery.id))
        self._ids.trace = trace_id(job, recovery.id)
        spans = phases(recovery)
        root = self._span("recovery", recovery.detected, None, attributes(job, recovery))
        for name, begin, end in spans:
            self._span(name, begin, root, {}).end(_ns(end))
        root.end(_ns(max(end for _, _, end in spans)))

    def _span(self, name: str, begin: float, parent: Any, values: dict[str, Any]) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context=context, start_time=_ns(begin), attributes=values)

    def close(self) -> None:
        """Send the remaining traces; blocks for a few seconds at most."""
        self._provider.shutdown()


class _Ids:
    """Makes ids for OpenTelemetry. ``trace`` is the id of the next trace; span ids follow from it and a
    count."""

    def __init__(self) -> None:
        self.trace = 1
        self._count = 0

    def generate_trace_id(self) -> int:
        self._count = 0
        return self.trace

    def generate_span_id(self) -> int:
        self._count += 1
        return _number(f"{self.trace} {self._count}", 8)

    def is_trace_id_random(self) -> bool:
        return False


def trace_id(job: str, recovery: int) -> int:
    """Return the trace id of this recovery record; no other record has it."""
    return _number(f"{job} {recovery}", 16)


def phases(recovery: RecoveryRecord) -> list[tuple[str, float, float]]:
    """(name, begin, end) in Unix seconds of each phase that has been reached."""
    names = ("epoch committed", "links up", "first step committed")
    spans, begin = [], recovery.detected
    ends = (recovery.epoch_committed, recovery.links_up, recovery.step_committed)
    for name, end in zip(names, ends, strict=True):
        if end:
            spans.append((name, begin, max(begin, end)))
            begin = max(begin, end)
    for replica, back in sorted(recovery.lost.items()):
        begin = recovery.detected
        ends = (back.started, back.has_state, back.joined)
        for what, end in zip(("started", "state transferred", "joined"), ends, strict=True):
            if end:
                spans.append((f"{replica} {what}", begin, max(begin, end)))
                begin = max(begin, end)
    return spans


def attributes(job: str, recovery: RecoveryRecord) -> dict[str, Any]:
    """Return the attributes of the trace; ``fabric.incident_id`` is also in all logs."""
    diagnosis = recovery.diagnosis or {}
    return {
        "fabric.job": job,
        "fabric.incident_id": recovery.incident_id,
        "fabric.kind": recovery.kind,
        "fabric.why": recovery.why,
        "fabric.verdict": str(diagnosis.get("verdict", "")),
        "fabric.epoch": recovery.epoch,
        "fabric.step": recovery.step,
        "fabric.steps_lost": recovery.steps_lost,
        "fabric.lost": list(recovery.lost),
    }


def _ns(seconds: float) -> int:
    return int(seconds * _NS)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest()) or 1
