"""Replies of several operations: results for each of several sources, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from zeus_ipc.wire import Message

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class ErrorBody(Message):
    """What a reply carries under `error`, for the whole request or for one GPU."""

    code: str
    """Stable code, see `zeus_ipc.errors.ErrorCode`."""
    message: str
    """One sentence for a person: what failed, why, and what to do."""
    gpu: str | None = None
    """UUID of the GPU concerned, if any."""
    details: dict[str, Any] = {}
    """Further facts by name. If a device refused: `outcome` (invalid, busy, lost, denied,
    unsupported, transient, unchanged), `device_code` and `device_call`, as its vendor has them."""


class Refused(Message):
    """The result for a GPU, or another source, on which the request failed."""

    error: ErrorBody


class Results(Message):
    """Result of a request for several GPUs: the result for each, or `Refused`."""

    gpus: dict[str, Any]
    """By UUID."""


class PastResults(Message):
    """Result of `windows` and `timeline`: the result for each source, or `Refused`."""

    sources: dict[str, Any]
    """By its name."""


class EmptyResult(Message):
    """Result for one GPU of a request that returns nothing."""


class Deferred(Message):
    """What a reply carries under `deferred` if sets with `block=False` have failed."""

    count: int
    """Number of failures since the last report."""
    last: ErrorBody
    """The newest failure."""


class Envelope(TypedDict):
    """A reply: a result or an error, under the id of its request."""

    v: int
    id: int
    result: NotRequired[Message]
    error: NotRequired[ErrorBody]
    deferred: NotRequired[Deferred]
