"""Spans and `hw.energy`, as OpenTelemetry's own SDK receives them."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.zeus.serving.batches import published
from tests.zeus.serving.server import PRIOR
from zeus.serving.ledger import Ledger
from zeus.serving.telemetry import Telemetry, over_http
from zeus.serving.wire import Arrival, EngineStep

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
MS = 10**6


def test_a_finished_request_is_a_span_of_its_own_trace() -> None:
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    begin_ns = time.monotonic_ns() - 10**9
    ledger = Ledger(["GPU-1"], prior=PRIOR)
    telemetry = Telemetry(
        tracers, MeterProvider(metric_readers=[metrics]), lambda: ledger.meter.boards_j, "llama"
    )
    ledger.take(Arrival("0", "a", begin_ns, 5, f"00-{TRACE}-{PARENT}-01"))
    for n in range(31):
        ledger.sample(published("GPU-1", begin_ns + n * 5 * MS, n * 1_000_000, n, 1500))
    for n, name in enumerate(("a", "b", "late")):
        at_ns = begin_ns + n * 50 * MS
        ledger.step(EngineStep("0", n + 1, at_ns, at_ns + 50 * MS, [name], [True], [5], [0]))
        ledger.finish(name, "search" if name == "a" else "")
    before_ns = time.time_ns() - 10**9
    telemetry.finished("0", ledger.settle().rows, ledger.trace)

    found: dict[str, Any] = {
        one.attributes["gen_ai.request.id"]: one for one in spans.get_finished_spans()
    }
    assert set(found) == {"a", "b", "late"}
    own, other = found["a"], found["b"]
    assert f"{own.context.trace_id:032x}" == TRACE
    assert f"{own.parent.span_id:016x}" == PARENT
    assert other.parent is None
    assert own.attributes["zeus.energy.joules"] > 0
    assert own.attributes["zeus.energy.method"] == "regression"
    assert own.attributes["zeus.tenant"] == "search"
    assert own.attributes["zeus.group"] == TRACE
    assert own.attributes["gen_ai.request.model"] == "llama"
    assert own.end_time - own.start_time == 50 * MS
    assert abs(own.start_time - before_ns) < 10**9

    data: Any = metrics.get_metrics_data()
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.data.data_points
    assert (metric.name, metric.unit) == ("hw.energy", "J")
    assert point.attributes == {"hw.type": "gpu", "hw.id": "GPU-1"}
    assert point.value == 30.0
    telemetry.close()


def test_a_refused_request_says_why() -> None:
    spans = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    ledger = Ledger(["GPU-1"])
    ledger.step(EngineStep("0", 1, 0, 50 * MS, ["a"], [True], [5], [0]))
    rows = ledger.settle().rows
    Telemetry(tracers, MeterProvider(), dict).finished("0", rows, ledger.trace)

    (span,) = spans.get_finished_spans()
    assert span.attributes is not None
    assert "zeus.energy.joules" not in span.attributes
    assert span.attributes["zeus.energy.reason"]


def test_a_collector_is_sent_both_over_http() -> None:
    asked: dict[str, bytes] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked[self.path] = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
            self.send_response(200)
            self.end_headers()

    ledger = Ledger()
    ledger.step(EngineStep("0", 1, 0, 50 * MS, ["of a user"], [True], [5], [0]))
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        telemetry = over_http(url, lambda: {"GPU-1": 30.0}, "llama")
        telemetry.finished("0", ledger.settle().rows, ledger.trace)
        telemetry.close()
        server.shutdown()
    assert sorted(asked) == ["/v1/metrics", "/v1/traces"]
    assert all(b"zeus-serving" in body for body in asked.values())
    assert b"GPU-1" in asked["/v1/metrics"]
    assert b"of a user" in asked["/v1/traces"]
