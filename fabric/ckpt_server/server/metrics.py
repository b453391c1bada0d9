"""Metrics for Prometheus: counted transfers, and memory and trainer as they are at the scrape.

The registry is our own, so that it holds no metrics of the process or of other libraries.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.slots import GRADIENT, SNAPSHOT, SlotTable
from fabric.ckpt_server.server.trainer_watch import STATES, TrainerWatch
from fabric.runtime.http.connection_limit import ConnectionLimit, ConnectionMetrics


class CkptMetrics:
    """Counts transfers and ``connections``; ``render`` gives the text for a scrape."""

    def __init__(self, memory: SlotTable, trainer: TrainerWatch, durable: DurableJobs) -> None:
        self.connections = ConnectionLimit()
        self._registry = CollectorRegistry()
        self._registry.register(ConnectionMetrics("fabric_ckpt_http_", self.connections))
        self._served = Counter(
            "fabric_ckpt_served_bytes", "Bytes of state sent to readers.", ["kind"], registry=self._registry
        )
        self._aborted = Counter(
            "fabric_ckpt_aborted_transfers",
            "Transfers that did not end whole: withdrawn, stalled or left by the reader.",
            ["kind"],
            registry=self._registry,
        )
        self._active = Gauge(
            "fabric_ckpt_active_transfers", "Transfers under way.", ["kind"], registry=self._registry
        )
        for kind in (SNAPSHOT, GRADIENT):
            for metric in (self._served, self._aborted, self._active):
                metric.labels(kind)
        self._registry.register(_SlotCollector(memory, trainer, durable))

    @contextmanager
    def transfer(self, kind: str) -> Iterator[Counter]:
        """Count one transfer while it lasts; yields the counter of bytes sent."""
        self._active.labels(kind).inc()
        complete = False
        try:
            yield self._served.labels(kind)
            complete = True
        finally:
            self._active.labels(kind).dec()
            if not complete:
                self._aborted.labels(kind).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _SlotCollector(Collector):
    """Reads the slots and the trainer's state at the time of the scrape."""

    def __init__(self, memory: SlotTable, trainer: TrainerWatch, durable: DurableJobs) -> None:
        self._memory = memory
        self._trainer = trainer
        self._durable = durable

    def collect(self) -> Iterator[Metric]:
        yield from self._content()
        yield self._bytes()
        yield self._state()
        yield from self._written()

    def _written(self) -> Iterator[Metric]:
        durable = self._durable
        if durable.newest is not None:
            yield GaugeMetricFamily(
                "fabric_ckpt_durable_step",
                "Newest durable checkpoint written from here.",
                durable.newest.step,
            )
            yield GaugeMetricFamily(
                "fabric_ckpt_durable_seconds", "Time that the last durable checkpoint took.", durable.seconds
            )
        yield CounterMetricFamily(
            "fabric_ckpt_durable_failures", "Durable checkpoints that could not be written.", durable.failures
        )

    def _content(self) -> Iterator[Metric]:
        for kind in (SNAPSHOT, GRADIENT):
            held = self._memory.contents(kind)
            count = GaugeMetricFamily(f"fabric_ckpt_{kind}s", f"Published {kind}s.")
            count.add_metric([], len(held))
            yield count
            if held:
                step = GaugeMetricFamily(f"fabric_ckpt_{kind}_step", f"Step of the newest {kind}.")
                step.add_metric([], held[-1].step)
                yield step
                age = GaugeMetricFamily(f"fabric_ckpt_{kind}_age_seconds", f"Age of the newest {kind}.")
                age.add_metric([], time.monotonic() - held[-1].taken)
                yield age

    def _bytes(self) -> Metric:
        family = GaugeMetricFamily("fabric_ckpt_memory_bytes", "Shared memory allocated.", labels=["kind"])
        for kind in (SNAPSHOT, GRADIENT):
            family.add_metric([kind], sum(s.capacity for s in self._memory.slots() if s.kind == kind))
        return family

    def _state(self) -> Metric:
        family = GaugeMetricFamily(
            "fabric_ckpt_trainer", "1 for the state that the trainer process is in.", labels=["state"]
        )
        now = self._trainer.state
        for state in STATES:
            family.add_metric([state], float(state == now))
        return family
