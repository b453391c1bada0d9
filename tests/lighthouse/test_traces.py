"""Recoveries as OpenTelemetry traces, at a collector that speaks OTLP over HTTP."""

import http.server
import subprocess
import sys
import threading

import pytest

from fabric.errors import ConfigError
from fabric.lighthouse.history.recovery import RecoveryRecord, ReplicaReturn
from fabric.lighthouse.telemetry import Traces, phases, trace_id

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

RECOVERY = RecoveryRecord(
    7,
    "death",
    "r1: its process is gone",
    12,
    100.0,
    epoch=2,
    lost={"r1": ReplicaReturn(103.0, 104.0, 105.5)},
    epoch_committed=100.01,
    links_up=100.02,
    step_committed=100.5,
    incident_id="e2",
    diagnosis={"verdict": "absent rank"},
)


class Collector:
    """Keeps the spans that are posted to it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans, kept = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        kept.spans += scope.spans
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_recovery_arrives_as_one_trace_with_its_own_times():
    collector = Collector()
    try:
        traces = Traces(collector.url)
        for _ in range(2):
            traces.recovery("gpt", RECOVERY)
        traces.close()
        by_name = {span.name: span for span in collector.spans}
        assert len(by_name) == len(collector.spans) == 7, "sent once"
        root = by_name["recovery"]
        assert {span.trace_id for span in collector.spans} == {trace_id("gpt", 7).to_bytes(16)}
        assert {s.parent_span_id for s in collector.spans if s is not root} == {root.span_id}
        assert len({span.span_id for span in collector.spans}) == 7
        assert (root.start_time_unix_nano, root.end_time_unix_nano) == (100 * 10**9, 1055 * 10**8)
        back = by_name["r1 joined"]
        assert (back.start_time_unix_nano, back.end_time_unix_nano) == (104 * 10**9, 1055 * 10**8)
        said = {a.key: a.value.string_value for a in root.attributes}
        assert (said["fabric.incident_id"], said["fabric.verdict"]) == ("e2", "absent rank")
    finally:
        collector.close()


def test_an_open_recovery_is_not_sent():
    collector = Collector()
    try:
        traces = Traces(collector.url)
        traces.recovery("gpt", RecoveryRecord(7, "death", "", 12, 100.0, diagnosis={}))
        traces.close()
        assert not collector.spans
    finally:
        collector.close()


def test_phases_follow_one_another_even_where_clocks_do_not():
    odd = RecoveryRecord(1, "abort", "", 1, 10.0, epoch_committed=9.0, step_committed=11.0)
    assert phases(odd) == [("epoch committed", 10.0, 10.0), ("first step committed", 10.0, 11.0)]


def test_without_opentelemetry_installed_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from fabric.lighthouse.telemetry import Traces\n"
        "Traces('http://127.0.0.1:1')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'ckpt-fabric[otel]', or leave --otlp out" in ran.stderr
    with pytest.raises(ConfigError, match="is no URL"):
        Traces("collector:4318")
