"""Clients of HTTP servers, and the servers' error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

if TYPE_CHECKING:
    import httpx

_MOST = 500
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


def detail(answer: httpx.Response) -> str:
    """Returns the message of an error response: FastAPI's `detail`, else the text."""
    try:
        found = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        found = answer.text
    if isinstance(found, list):  # of validation errors
        found = "; ".join(map(_field, found))
    return " ".join(str(found).split())[:_MOST]


def _field(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    where = ".".join(str(part) for part in error.get("loc", ()) if part != "body")
    return ": ".join(filter(None, [where, str(error.get("msg", ""))]))
