"""ASGI middleware that returns the id under which the energy of a request can be queried.

    vllm serve ... --middleware zeus.serving.asgi.EnergyHeader

The energy is known about two seconds after a request has ended, so a response only has the header
`X-Energy-Request`: query `GET /energy/{id}` of `python -m zeus.serving serve`. The id is the
request's `X-Request-Id`. A request without one gets one, which engines that use the header (vLLM)
use too.

If `ZEUS_SERVING_TENANT_HEADER` names a header, its value is the request's tenant in reports. Set
the header in your gateway, and do not let clients set it.

A request that is part of a trace (`traceparent`), or that names its task or phase in `baggage` with
the member `zeus.group`, is part of this group in reports.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from zeus.serving.recorder import Recorder
from zeus.serving.wire import MOST_LABEL, group_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

ID_HEADER = b"x-request-id"
ENERGY_HEADER = b"x-energy-request"
TENANT_ENV = "ZEUS_SERVING_TENANT_HEADER"


class EnergyHeader:
    """The middleware."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._tenant_header = os.environ.get(TENANT_ENV, "").strip().lower().encode()
        self._recorder = Recorder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = list(scope.get("headers", ()))

        def header(wanted: bytes) -> bytes:
            return next((value for name, value in headers if name.lower() == wanted), b"")

        given = header(ID_HEADER)
        if not 0 < len(given) <= MOST_LABEL or not given.isascii():
            given = uuid.uuid4().hex.encode()
            headers = [(name, value) for name, value in headers if name.lower() != ID_HEADER]
            headers.append((ID_HEADER, given))
            scope = {**scope, "headers": headers}
        energy_id = _engine_id(str(scope.get("path", "")), given.decode())
        tenant = header(self._tenant_header) if self._tenant_header else b""
        trace, baggage = (header(name).decode("latin-1") for name in (b"traceparent", b"baggage"))
        group = group_of(trace, baggage)
        if tenant or group:
            self._recorder.owner(energy_id, tenant[:MOST_LABEL].decode("latin-1"), group)

        async def with_header(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                sent = list(message.get("headers", ()))
                message = {**message, "headers": [*sent, (ENERGY_HEADER, energy_id.encode())]}
            await send(message)

        await self._app(scope, receive, with_header)


def _engine_id(path: str, given: str) -> str:
    """vLLM's name of a request, by its path."""
    if path.endswith("/chat/completions"):
        return f"chatcmpl-{given}"
    return f"cmpl-{given}-0" if path.endswith("/completions") else given
