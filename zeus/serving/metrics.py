"""Energy and clocks of inference as Prometheus metrics, without series of single requests.

    from zeus.serving.metrics import register
    register("http://127.0.0.1:9462")  # adds a ledger's metrics to those of this process

Needs prometheus_client: pip install "zeusd[metrics]".
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zeus.utils.lazy import needed

if TYPE_CHECKING:
    from zeus.serving.clock_control import ClockStatus
    from zeus.serving.ledger import Ledger
    from zeus.serving.rows import RequestEnergy

log = logging.getLogger(__name__)

BUCKETS_J = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)
"""Upper bounds of the histogram of J per request."""
BUCKETS_TOKEN_J = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of J per output token."""
URL_ENV = "ZEUS_SERVING_METRICS"
"""Address of the ledger, whose metrics vLLM's plugin relays."""
EVERY_S = 5.0
"""Period of fetching them."""
MOST_BYTES = 2**22
PREFIX = "zeus_serving_"

_registered: set[str] = set()


class Family(NamedTuple):
    """A metric.

    Attributes:
        kind: `Counter` or `Gauge`.
        name: Without the prefix `zeus_serving_`.
        label: A further label beside `model_name` and `engine`; empty: none.
        values: Its values by this label, of a ledger or a status; NaN: not known, so no series.
    """

    kind: str
    name: str
    label: str
    values: Callable[[Any], Mapping[str, float]]
    text: str


def _one(name: str) -> Callable[[Any], Mapping[str, float]]:
    return lambda source: {"": getattr(source, name)}


def _by_slo(name: str) -> Callable[[ClockStatus], Mapping[str, float]]:
    return lambda status: {slo: getattr(status, name.format(slo)) for slo in ("ttft", "tpot")}


def _clocks(status: ClockStatus) -> Mapping[str, float]:
    return {
        "wanted": status.wanted_mhz * 1e6,
        "set": status.set_mhz * 1e6,
        "effective": status.effective_mhz * 1e6,
        "needed": status.needed_mhz * 1e6 or math.nan,
    }


# fmt: off
ENERGY = (
    Family("Counter", "energy_joules", "phase", lambda ledger: ledger.phases,
           "Energy attributed to inference by phase."),
    Family("Counter", "tokens", "kind", lambda ledger: ledger.tokens, "Tokens computed."),
    Family("Gauge", "uncertainty_ratio", "", _one("uncertainty"),
           "Mean uncertainty of a request's energy, one sigma."),
    Family("Gauge", "fit_residual_ratio", "", _one("residual"),
           "Share of a sensor update's energy that the steps do not explain."),
    Family("Gauge", "clock_hertz", "", _one("clock_hz"), "Clock of the first GPU."),
)
CLOCKS = (
    Family("Gauge", "clock_hertz", "kind", _clocks,
           "Graphics clock: wanted by the policy, set, sampled on the slowest GPU, and the highest "
           "that the objectives needed in the last minutes"),
    Family("Gauge", "clock_control_working", "", _one("working"),
           "1 while clocks are set, else 0"),
    Family("Gauge", "predicted_seconds", "slo", _by_slo("predicted_{}_s"),
           "Prediction of the policy at the wanted clock"),
    Family("Gauge", "seen_seconds", "slo", _by_slo("seen_{}_s"),
           "Latency of the last request that ended"),
    Family("Counter", "slo_violations", "slo", _by_slo("{}_violations"),
           "Requests that missed the objective"),
    Family("Counter", "escapes", "", _one("escapes"),
           "Times that steps took far longer than predicted"),
    Family("Counter", "clock_changes", "", _one("changes"), "Number of clock changes"),
    Family("Gauge", "needed_power_watts", "", _one("needed_w"),
           "Power limit that each GPU of the instance needed in the last minutes"),
    Family("Gauge", "energy_saving_ratio", "", _one("saving"),
           "Share of energy saved compared with the highest clock, by a fit of its energy"),
)
# fmt: on


class Collector:
    """A Prometheus collector of the families of sources by engine.

    Args:
        registry: Where it is registered; None: a registry of its own.

    Attributes:
        app: A WSGI application that serves all metrics of the registry.
    """

    def __init__(
        self,
        model: str,
        families: Sequence[Family],
        sources: Callable[[], Mapping[str, Any]],
        registry: Any = None,
    ) -> None:
        client = needed("prometheus_client", "metrics", "metrics")
        self._core = needed("prometheus_client.core", "metrics", "metrics")
        self._model, self._families, self._sources = model, families, sources
        self.registry = registry or client.CollectorRegistry()
        self.registry.register(self)
        self.app = client.make_wsgi_app(self.registry)

    def collect(self) -> Iterator[Any]:
        """The metrics; called by the registry."""
        sources = self._sources()
        for kind, name, label, values, text in self._families:
            labels = ["model_name", "engine", *([label] if label else [])]
            family = getattr(self._core, f"{kind}MetricFamily")
            metric = family(f"zeus_serving_{name}", text, labels=labels)
            for engine, source in sources.items():
                for value, number in values(source).items():
                    if not math.isnan(number):
                        own = [value] if label else []
                        metric.add_metric([self._model, engine, *own], number)
            yield metric


class EnergyCollector(Collector):
    """Prometheus collector of ledgers by engine.

        from prometheus_client import REGISTRY
        collector = EnergyCollector("llama-8b", {"0": ledger}, REGISTRY)

    Energy is counted as soon as it is attributed provisionally. Corrections of a settlement are
    added later, so a counter never decreases.
    """

    def __init__(self, model: str, ledgers: Mapping[str, Ledger], registry: Any = None) -> None:
        super().__init__(model, ENERGY, lambda: ledgers, registry)
        histogram = needed("prometheus_client", "metrics", "metrics").Histogram
        labels = ["model_name", "engine"]
        self._joules, self._token_joules = (
            histogram(f"zeus_serving_{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                ("request_energy_joules", "Energy of a finished request.", BUCKETS_J),
                (
                    "request_energy_per_output_token_joules",
                    "Energy of a finished request per decoded token.",
                    BUCKETS_TOKEN_J,
                ),
            )
        )
        for engine in ledgers:
            self.finished(engine, ())

    def finished(self, engine: str, rows: Sequence[RequestEnergy]) -> None:
        """Counts requests in the histograms. Pass each request once."""
        joules = self._joules.labels(self._model, engine)
        token_joules = self._token_joules.labels(self._model, engine)
        for row in rows:
            if not row.refused:
                joules.observe(row.joules)
                if row.decode_tokens:
                    token_joules.observe(row.joules / row.decode_tokens)


def register(url: str, registry: Any = None) -> Relay | None:
    """Adds the ledger's metrics to a registry, once for each URL. Never raises into an engine.

    Args:
        url: Address of `python -m zeus.serving serve --listen`.
        registry: A `CollectorRegistry`; None: `prometheus_client.REGISTRY`.
    """
    if url in _registered:
        return None
    try:
        home = needed("prometheus_client", "metrics", "metrics")
        relay = Relay(url)
        (home.REGISTRY if registry is None else registry).register(relay)
    except Exception as error:  # noqa: BLE001 - never raise into an engine
        log.warning("the engine's metrics do not include energy: %s", error)
        return None
    _registered.add(url)
    return relay


class Relay:
    """A collector of a ledger's metrics; see `register`.

    A thread fetches them, so that a scrape of the engine never waits for the ledger. While the
    ledger does not respond, its metrics are missing.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/metrics"
        self._parse = needed(
            "prometheus_client.parser", "metrics", "metrics"
        ).text_string_to_metric_families
        self._families: list[Any] = []
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="zeus-serving-relay", daemon=True)
        self._thread.start()

    def collect(self) -> Iterable[Any]:
        """The metrics fetched last; called by the registry."""
        return self._families if os.getpid() == self._pid else []

    def close(self) -> None:
        """Stops fetching."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            families: list[Any] = []
            with contextlib.suppress(Exception):  # it is down, or another program responds
                with urllib.request.urlopen(self._url, timeout=EVERY_S) as answer:
                    text = answer.read(MOST_BYTES).decode()
                families = [one for one in self._parse(text) if one.name.startswith(PREFIX)]
            self._families = families
            if self._ended.wait(EVERY_S):
                return
