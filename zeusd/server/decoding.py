"""Decodes a client's bytes to a validated request, or to a reply that says what is wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from zeus_common.text import explain
from zeus_ipc.codec import decode_request, id_of
from zeus_ipc.errors import ErrorCode
from zeus_ipc.operations import OPERATIONS
from zeus_ipc.parsing import Malformed
from zeus_ipc.replies import Envelope, ErrorBody
from zeus_ipc.requests import Request, request_adapter
from zeus_ipc.wire import PROTOCOL_VERSION


class Invalid(Exception):
    """A request that cannot be served."""

    def __init__(
        self, request_id: int, code: str, message: str, awaited: bool = True, **details: Any
    ) -> None:
        super().__init__(message)
        more: dict[str, Any] = {"details": details} if details else {}
        self.error = ErrorBody(code=code, message=message, **more)
        self.reply: Envelope = {"v": PROTOCOL_VERSION, "id": request_id, "error": self.error}
        self.awaited = awaited


def prepare() -> None:
    """Builds the validators at start, so that the first client does not wait for it."""
    with suppress(ValidationError):  # TypeAdapter.rebuild() is new in pydantic 2.10
        request_adapter.validate_python(None)


def decode(data: bytes) -> Request:
    """The request in one message.

    Raises:
        Invalid: The message is not a request that this zeusd supports.
    """
    fault = None
    try:
        message = decode_request(data)
    except Malformed as error:
        message, fault = {"id": id_of(data)}, f"{error}; a request is one msgpack map"
    request_id = message.get("id")
    if not isinstance(request_id, int) or isinstance(request_id, bool) or request_id < 0:
        raise Invalid(
            0, ErrorCode.BAD_REQUEST, "the request has no usable id; send a non-negative integer"
        )
    if fault is not None:
        raise Invalid(request_id, ErrorCode.BAD_REQUEST, fault)
    if message.get("v") != PROTOCOL_VERSION:
        raise Invalid(
            request_id,
            ErrorCode.UNSUPPORTED_VERSION,
            f"this zeusd speaks protocol version {PROTOCOL_VERSION}, not "
            f"{message.get('v')!r:.100}; use matching releases of zeusd and its client",
            protocols=[PROTOCOL_VERSION],
        )
    op = message.get("op")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise Invalid(
            request_id,
            ErrorCode.UNKNOWN_OPERATION,
            f"unknown operation {op!r:.100}; this zeusd knows: {', '.join(OPERATIONS)}",
            operations=list(OPERATIONS),
        )
    try:
        request: Request = request_adapter.validator.validate_python(message)
        return request
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)[:3]
        text = "; ".join(explain({**fault, "loc": fault["loc"][1:]})[:200] for fault in faults)
        text, awaited = f"the request is not valid: {text}", message.get("block") is not False
        raise Invalid(request_id, ErrorCode.BAD_REQUEST, text, awaited) from None
