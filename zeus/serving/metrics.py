"""Energy of inference as Prometheus metrics, without series of single requests.

    from prometheus_client import REGISTRY
    REGISTRY.register(EnergyCollector(model, engine, accountant))

Needs prometheus_client: pip install "zeusd[metrics]".
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from zeus.serving.accountant import Accountant
from zeus.serving.rows import RequestEnergy
from zeus.utils.lazy import needed

BUCKETS_J = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)
"""Upper bounds of the histogram of J per request."""
BUCKETS_TOKEN_J = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of J per output token."""


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        at = next((n for n, bound in enumerate(self._bounds) if value <= bound), -1)
        self._counts[at] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as in Prometheus."""
        total, found = 0, []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == math.inf else f"{bound:g}", float(total)))
        return found


class EnergyCollector:
    """Prometheus collector of one engine.

    Energy is counted as soon as it is attributed provisionally. Corrections of a settlement are
    added later, so a counter never decreases.

    Args:
        accountant: The source of the figures.
    """

    def __init__(self, model: str, engine: str, accountant: Accountant) -> None:
        self._core = needed("prometheus_client.core", "metrics", "metrics")
        self._labels = [model, engine]
        self._accountant = accountant
        self._guard = threading.Lock()
        self._requests = Histogram(BUCKETS_J)
        self._per_token = Histogram(BUCKETS_TOKEN_J)

    def finished(self, rows: Sequence[RequestEnergy]) -> None:
        """Counts requests in the histograms. Pass each request once."""
        with self._guard:
            for row in rows:
                if not row.refused:
                    self._requests.add(row.joules)
                    if row.decode_tokens:
                        self._per_token.add(row.joules / row.decode_tokens)

    def collect(self) -> Iterator[Any]:
        """The metrics; called by the registry."""
        names = ("model_name", "engine")
        core, labels = self._core, self._labels
        totals = self._accountant.phases
        energy = core.CounterMetricFamily(
            "zeus_serving_energy_joules",
            "Energy attributed to inference by phase.",
            labels=(*names, "phase"),
        )
        for phase, joules in totals.items():
            energy.add_metric([*labels, phase], joules)
        yield energy
        tokens = core.CounterMetricFamily(
            "zeus_serving_tokens", "Tokens computed.", labels=(*names, "kind")
        )
        for kind, count in self._accountant.tokens.items():
            tokens.add_metric([*labels, kind], count)
        yield tokens
        with self._guard:
            for name, text, histogram in (
                ("request_energy_joules", "Energy of a finished request.", self._requests),
                (
                    "request_energy_per_output_token_joules",
                    "Energy of a finished request per decoded token.",
                    self._per_token,
                ),
            ):
                family = core.HistogramMetricFamily(f"zeus_serving_{name}", text, labels=names)
                family.add_metric(labels, histogram.buckets(), histogram.sum)
                yield family
        for name, text, value in (
            (
                "uncertainty_ratio",
                "Mean uncertainty of a request's energy, one sigma.",
                self._accountant.uncertainty,
            ),
            (
                "fit_residual_ratio",
                "Share of a sensor update's energy that the steps do not explain.",
                self._accountant.residual,
            ),
            ("clock_hertz", "Clock of the first GPU.", self._accountant.clock_hz),
        ):
            gauge = core.GaugeMetricFamily(f"zeus_serving_{name}", text, labels=names)
            gauge.add_metric(labels, value)
            yield gauge
