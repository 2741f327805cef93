"""Clients of HTTP servers: connections, retries, and the servers' error messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

if TYPE_CHECKING:
    import httpx
    import tenacity

CONNECT_S = 5.0


def client(url: str, token: str | None, read_s: float) -> httpx.Client:
    """Returns a client that sends JSON.

    Raises:
        ValueError: The URL or token cannot be used, or a proxy or certificate that the environment
            names.
        ImportError: httpx is not installed.
    """
    import httpx

    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    timeout = httpx.Timeout(read_s, connect=CONNECT_S)
    try:
        return httpx.Client(
            base_url=url,
            headers=headers,
            timeout=timeout,
            # Over http:// without a proxy there is no certificate (redirects are not followed), and
            # reading all authorities takes most of the time of making a client.
            verify=not url.startswith("http://") or bool(getproxies()),
        )
    except (httpx.InvalidURL, ValueError, OSError, ImportError) as error:
        raise ValueError(
            f"the server {url} cannot be used ({error}); check its URL and token, and the proxies "
            "and certificates in the environment (ALL_PROXY, HTTP_PROXY, NO_PROXY, SSL_CERT_FILE)"
        ) from None


def retrying(
    may_pass: Callable[[BaseException], bool],
    backoff_s: tuple[float, float],
    wait_s: float | None = None,
    stop: threading.Event | None = None,
    failed: Callable[[BaseException], None] | None = None,
) -> tenacity.Retrying:
    """Returns what calls a function again while it fails, with exponential backoff and with jitter
    between clients. The last failure is raised.

    Args:
        may_pass: Whether the call may succeed after this failure.
        backoff_s: Shortest and longest pause, s.
        wait_s: How long to retry, s; 0: never; None: without end.
        stop: Ends the retries, and the present pause.
        failed: Called with each failure that may pass, before the pause.

    Raises:
        ImportError: tenacity is not installed.
    """
    try:
        import tenacity
    except ImportError:
        raise ImportError(
            "calling a server needs tenacity; install it with pip install 'zeusd[bso]', or "
            "'zeusd[pfo]' for pipelines"
        ) from None
    stop = threading.Event() if stop is None else stop
    ends: tenacity.stop.stop_base = tenacity.stop_when_event_set(stop)
    if wait_s is not None:
        ends |= tenacity.stop_before_delay(wait_s) | tenacity.stop_after_delay(wait_s)

    def report(state: tenacity.RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if failed is not None and error is not None:
            failed(error)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_pass),
        wait=tenacity.wait_random_exponential(multiplier=backoff_s[0], max=backoff_s[1]),
        stop=ends,
        sleep=tenacity.sleep_using_event(stop),
        before_sleep=report,
        reraise=True,
    )


def detail(answer: httpx.Response) -> str:
    """Returns the message of an error response: FastAPI's `detail`, else the text."""
    try:
        text = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        text = answer.text
    if isinstance(text, list):  # of validation errors
        text = "; ".join(map(_field, text))
    return " ".join(str(text).split())[:500]


def _field(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    where = ".".join(str(part) for part in error.get("loc", ()) if part != "body")
    return ": ".join(filter(None, [where, str(error.get("msg", ""))]))
