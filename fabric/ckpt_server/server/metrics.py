"""Metrics for Prometheus: counted transfers, and memory and trainer as they are at the scrape.

The registry is our own, so that it holds no metrics of the process or of other libraries.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.ckpt_server.server.local_ranks import LocalRank
from fabric.ckpt_server.server.slots import GRADIENT, SNAPSHOT
from fabric.ckpt_server.server.trainer_watch import STATES
from fabric.runtime.http.http_service import ConnectionMetrics


class CkptMetrics:
    """Counts transfers and ``connections`` of all ranks; ``render`` gives the text for a scrape."""

    def __init__(self, ranks: Mapping[int, LocalRank]) -> None:
        self._registry = CollectorRegistry()
        self.connections = ConnectionMetrics(self._registry, "fabric_ckpt_http_").limit
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
        self._registry.register(_RankCollector(ranks))

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
        return generate_latest(self._registry)


class _RankCollector(Collector):
    """Reads the slots and the trainers' states at the time of the scrape."""

    def __init__(self, ranks: Mapping[int, LocalRank]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, rank in sorted(self._ranks.items()):
            for metric in _metrics_of(rank):
                family = families.setdefault(metric.name, metric)
                if family is not metric:
                    family.samples += metric.samples
                for sample in metric.samples:
                    sample.labels["rank"] = str(number)
        yield from families.values()


def _metrics_of(rank: LocalRank) -> Iterator[Metric]:
    for kind in (SNAPSHOT, GRADIENT):
        held = rank.slots.contents(kind)
        yield GaugeMetricFamily(f"fabric_ckpt_{kind}s", f"Published {kind}s.", len(held))
        if held:
            newest, age_s = held[-1], time.monotonic() - held[-1].taken
            yield GaugeMetricFamily(f"fabric_ckpt_{kind}_step", f"Step of the newest {kind}.", newest.step)
            yield GaugeMetricFamily(f"fabric_ckpt_{kind}_age_seconds", f"Age of the newest {kind}.", age_s)
    memory = GaugeMetricFamily("fabric_ckpt_memory_bytes", "Shared memory allocated.", labels=["kind"])
    for kind in (SNAPSHOT, GRADIENT):
        memory.add_metric([kind], sum(s.capacity for s in rank.slots.slots() if s.kind == kind))
    yield memory
    trainer = GaugeMetricFamily(
        "fabric_ckpt_trainer", "1 for the state that the trainer process is in.", labels=["state"]
    )
    now, durable = rank.trainer.state, rank.durable
    for state in STATES:
        trainer.add_metric([state], float(state == now))
    yield trainer
    if durable.newest is not None:
        yield GaugeMetricFamily(
            "fabric_ckpt_durable_step", "Newest durable checkpoint written from here.", durable.newest.step
        )
        yield GaugeMetricFamily(
            "fabric_ckpt_durable_seconds", "Time that the last durable checkpoint took.", durable.seconds
        )
    yield CounterMetricFamily(
        "fabric_ckpt_durable_failures", "Durable checkpoints that could not be written.", durable.failures
    )
