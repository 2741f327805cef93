"""Energy for OpenTelemetry: `hw.energy` of boards, and a span for each finished request.

OpenTelemetry has no attribute for the energy of a request, so these start with `zeus.energy`. A
span is a child of the request's own trace if the engine received one (`traceparent`). It is sent
when the figure is first known, some seconds after the request's end.

Needs opentelemetry-sdk: pip install "zeusd[otel]".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zeus.serving.rows import RequestEnergy
from zeus.utils.lazy import needed
from zeus_common.epoch import offset_ns

SPAN = "zeus.energy"
SCOPE = "zeus.serving"


class Telemetry:
    """Sends to two OpenTelemetry providers.

    Args:
        tracers: A `TracerProvider`.
        meters: A `MeterProvider`.
        boards: Energy of each GPU so far, J, by UUID.
        model: Attribute `gen_ai.request.model`.
    """

    def __init__(
        self,
        tracers: Any,
        meters: Any,
        boards: Callable[[], Mapping[str, float]],
        model: str = "",
    ) -> None:
        self._providers = tracers, meters
        self._tracer = tracers.get_tracer(SCOPE)
        self._model = model
        self._propagator = needed(
            "opentelemetry.trace.propagation.tracecontext", "OpenTelemetry", "otel"
        ).TraceContextTextMapPropagator()
        observation = needed("opentelemetry.metrics", "OpenTelemetry", "otel").Observation

        def observe(_: Any) -> Iterable[Any]:
            for uuid, joules in boards().items():
                yield observation(joules, {"hw.type": "gpu", "hw.id": uuid})

        meters.get_meter(SCOPE).create_observable_counter(
            "hw.energy", [observe], unit="J", description="Energy of a GPU board."
        )

    def finished(
        self, engine: str, rows: Sequence[RequestEnergy], trace: Callable[[str], str]
    ) -> None:
        """Sends a span for each request; `trace` gives its `traceparent`, or an empty text."""
        wall_ns = offset_ns()
        for row in rows:
            parent = trace(row.request)
            context = self._propagator.extract({"traceparent": parent}) if parent else None
            span = self._tracer.start_span(
                SPAN,
                context=context,
                start_time=wall_ns + row.begin_ns,
                attributes=self._attributes(engine, row),
            )
            span.end(wall_ns + row.end_ns)

    def close(self) -> None:
        """Sends the remaining data."""
        for one in self._providers:
            one.shutdown()

    def _attributes(self, engine: str, row: RequestEnergy) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.request.id": row.request,
            "zeus.engine": engine,
            "zeus.energy.method": row.method,
            "zeus.energy.provisional": row.provisional,
        }
        if self._model:
            attributes["gen_ai.request.model"] = self._model
        if row.tenant:
            attributes["zeus.tenant"] = row.tenant
        if row.group:
            attributes["zeus.group"] = row.group
        if row.refused:
            attributes["zeus.energy.reason"] = row.reason
        else:
            attributes["zeus.energy.joules"] = row.joules
            attributes["zeus.energy.uncertainty"] = row.uncertainty_j
            attributes["zeus.energy.rule_uncertainty"] = row.rule_uncertainty_j
        return attributes


def over_http(endpoint: str, boards: Callable[[], Mapping[str, float]], model: str) -> Telemetry:
    """Telemetry for a collector that speaks OTLP over HTTP.

    Raises:
        ImportError: OpenTelemetry is not installed; the message says what to install.
        ValueError: The endpoint is not a URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp {endpoint!r} must be a URL, such as http://localhost:4318")

    def module(name: str) -> Any:
        return needed(f"opentelemetry.{name}", "--otlp", "otel")

    http = "exporter.otlp.proto.http"
    base = endpoint.rstrip("/")
    resource = module("sdk.resources").Resource.create({"service.name": "zeus-serving"})
    tracers = module("sdk.trace").TracerProvider(resource=resource)
    spans = module(f"{http}.trace_exporter").OTLPSpanExporter(f"{base}/v1/traces")
    tracers.add_span_processor(module("sdk.trace.export").BatchSpanProcessor(spans))
    metrics = module(f"{http}.metric_exporter").OTLPMetricExporter(f"{base}/v1/metrics")
    reader = module("sdk.metrics.export").PeriodicExportingMetricReader(metrics)
    meters = module("sdk.metrics").MeterProvider(metric_readers=[reader], resource=resource)
    return Telemetry(tracers, meters, boards, model)
