"""A group of metrics at a Prometheus push gateway."""

from __future__ import annotations

import base64
import http.client
import itertools
import logging
import os
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit

from zeus.exceptions import ZeusBaseError
from zeus.utils import framework
from zeus_common.outage import Outage

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

    from prometheus_client import CollectorRegistry

log = logging.getLogger("zeus.metric")

TIMEOUT_S = 5.0
"""Seconds after which a push is given up, however much of an answer has come."""

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Group:
    """One group at a push gateway."""

    def __init__(self, prometheus: Any, url: str, job: str, kind: str) -> None:
        self.url, credentials = checked(url)
        self._authorization = _basic(credentials)
        self._pushing: threading.Thread | None = None
        if not job:
            raise ValueError("job must not be empty; a push gateway tells jobs apart by their name")
        self.prometheus = prometheus
        self.registry: CollectorRegistry = prometheus.CollectorRegistry()
        self._job = job
        number = next(numbers[kind])
        self._key = {
            "instance": socket.gethostname(),
            "rank": rank(),
            "metric": kind if number == 1 else f"{kind}_{number}",
        }
        self._outage = Outage(log)
        self._opener = _opener(self.url)

    def push(self) -> bool:
        """Replaces this group at the gateway. Returns whether that succeeded."""
        failures: list[object] = ["timed out"]
        if self._pushing is None or not self._pushing.is_alive():
            self._pushing = threading.Thread(target=self._push, args=(failures,), daemon=True)
            try:
                self._pushing.start()  # the library limits the time of each read, not of all
                self._pushing.join(TIMEOUT_S)
            except RuntimeError:  # the interpreter ends, and does not wait for this
                self._push(failures)
        if failures:
            self._outage.failed(
                f"the push gateway at {self.url} takes no metrics ({failures[-1]}); training "
                "continues and zeus retries"
            )
            return False
        self._outage.succeeded()
        return True

    def _push(self, failures: list[object]) -> None:
        try:
            self.prometheus.push_to_gateway(
                self.url, self._job, self.registry, self._key, TIMEOUT_S, self._send
            )
            failures.clear()
        except (OSError, http.client.HTTPException, ValueError) as error:
            failures.append(error.reason if type(error) is URLError else error)

    def _send(
        self,
        url: str,
        method: str,
        timeout: float | None,
        headers: Sequence[tuple[str, str]],
        data: bytes,
    ) -> Callable[[], None]:
        from urllib.request import Request

        request = Request(url, data, dict(headers) | self._authorization, method=method)
        return lambda: self._opener.open(request, timeout=timeout).close()


def _opener(url: str) -> OpenerDirector:
    """What sends requests. Without a context for TLS, even for plain http, Python 3.12 loads all
    root certificates for each request: 40 MiB, and 24 ms of CPU."""
    from urllib.request import HTTPSHandler, build_opener

    secure = url.lower().startswith("https:")
    context = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return build_opener(HTTPSHandler(context=context))


numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
"""Of the metrics of each kind in this process."""


def prometheus_client() -> Any:
    """Imports the package.

    Raises:
        ZeusBaseError: It is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        raise ZeusBaseError(
            "metrics need the package prometheus_client, which is not installed; "
            'pip install "zeusd[metrics]"'
        ) from None
    return prometheus_client


def checked(url: str) -> tuple[str, str]:
    """Checks the URL of a push gateway; raises ValueError.

    Returns:
        The URL without credentials, and these.
    """
    scheme, separator, rest = url.rpartition("://")
    credentials, _, place = rest.rpartition("@")
    bare = f"{scheme}{separator}{place}"
    parts = urlsplit(bare if scheme else f"http://{bare}")
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        raise ValueError(
            f"pushgateway_url must be the address of a push gateway such as http://gateway:9091, "
            f"not {bare!r}"
        )
    return bare, unquote(credentials)


def _basic(credentials: str) -> dict[str, str]:
    """The header with `user:password`, if there is one."""
    if not credentials:
        return {}
    credentials += "" if ":" in credentials else ":"
    return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}


def rank() -> str:
    """This process's rank in its job; 0 if unknown."""
    if framework.world_size() > 1:
        return str(framework.rank())
    return next((os.environ[name] for name in RANKS if os.environ.get(name)), "0")
