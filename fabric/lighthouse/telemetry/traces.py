"""Sends each recovery as an OpenTelemetry trace: an optional extra, off by default.

A complete recovery record becomes a trace, with the record's times. A thread of the SDK sends the trace, and
no task waits for it. If the collector does not answer, only the trace is lost. The trace id depends only on
the record, not on the lighthouse that sends it.
"""

import hashlib
from collections import deque
from typing import Any

from fabric.errors import ConfigError
from fabric.lighthouse.history.recovery import CAPACITY, RecoveryRecord

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
