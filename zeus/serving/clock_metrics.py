"""Clock control's status as Prometheus metrics.

    from prometheus_client import REGISTRY
    REGISTRY.register(ClockCollector("llama-8b", "0", control))

Needs prometheus_client: pip install "zeusd[metrics]".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zeus.serving.clock_control import ClockControl


class ClockCollector:
    """Prometheus collector of one engine instance.

    Raises:
        ImportError: prometheus_client is not installed.
    """

    def __init__(self, model: str, engine: str, control: ClockControl) -> None:
        from prometheus_client import core

        self._core = core
        self._labels = [model, engine]
        self._control = control

    def collect(self) -> Iterator[Any]:
        """The metrics; called by the registry."""
        status = self._control.status()
        names = ["model_name", "engine"]

        def gauge(name: str, text: str, value: float) -> Any:
            found = self._core.GaugeMetricFamily(f"zeus_serving_{name}", text, labels=names)
            if not math.isnan(value):
                found.add_metric(self._labels, value)
            return found

        def by(name: str, text: str, label: str, values: dict[str, float], counter: bool) -> Any:
            kind = self._core.CounterMetricFamily if counter else self._core.GaugeMetricFamily
            found = kind(f"zeus_serving_{name}", text, labels=[*names, label])
            for value, number in values.items():
                if not math.isnan(number):
                    found.add_metric([*self._labels, value], number)
            return found

        yield by(
            "clock_hertz",
            "Graphics clock: wanted by the policy, set, sampled on the slowest GPU, and the "
            "highest that the objectives needed in the last minutes",
            "kind",
            {
                "wanted": status.wanted_mhz * 1e6,
                "set": status.set_mhz * 1e6,
                "effective": status.effective_mhz * 1e6,
                "needed": status.needed_mhz * 1e6 or math.nan,
            },
            False,
        )
        yield gauge(
            "clock_control_working", "1 while clocks are set, else 0", float(status.working)
        )
        yield by(
            "predicted_seconds",
            "Prediction of the policy at the wanted clock",
            "slo",
            {"ttft": status.predicted_ttft_s, "tpot": status.predicted_tpot_s},
            False,
        )
        yield by(
            "seen_seconds",
            "Latency of the last request that ended",
            "slo",
            {"ttft": status.seen_ttft_s, "tpot": status.seen_tpot_s},
            False,
        )
        yield by(
            "slo_violations",
            "Requests that missed the objective",
            "slo",
            {"ttft": status.ttft_violations, "tpot": status.tpot_violations},
            True,
        )
        for name, text, number in (
            ("escapes", "Times that steps took far longer than predicted", status.escapes),
            ("clock_changes", "Number of clock changes", status.changes),
        ):
            found = self._core.CounterMetricFamily(f"zeus_serving_{name}", text, labels=names)
            found.add_metric(self._labels, number)
            yield found
        yield gauge(
            "needed_power_watts",
            "Highest power of one GPU of the instance in the last minutes",
            status.needed_w,
        )
        yield gauge(
            "energy_saving_ratio",
            "Share of energy saved compared with the highest clock, by a fit of its energy",
            status.saving,
        )
