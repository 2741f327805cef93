"""The ledger's metrics on an engine's own Prometheus registry.

    from zeus.serving.relay import register
    register("http://127.0.0.1:9462")

A thread fetches them, so that a scrape of the engine never waits for the ledger. While the ledger
does not respond, its metrics are missing. Needs prometheus_client: pip install "zeusd[metrics]".
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import urllib.request
from collections.abc import Iterable
from typing import Any

from zeus.utils.lazy import needed

log = logging.getLogger(__name__)

URL_ENV = "ZEUS_SERVING_METRICS"
"""Address of the ledger, whose metrics vLLM's plugin relays."""
EVERY_S = 5.0
MOST_BYTES = 2**22
PREFIX = "zeus_serving_"

_registered: set[str] = set()


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
    """A collector of another process's metrics; see `register`."""

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
            found: list[Any] = []
            with contextlib.suppress(Exception):  # it is down, or another program responds
                with urllib.request.urlopen(self._url, timeout=EVERY_S) as answer:
                    text = answer.read(MOST_BYTES).decode()
                found = [one for one in self._parse(text) if one.name.startswith(PREFIX)]
            self._families = found
            if self._ended.wait(EVERY_S):
                return
