"""Replies that belong to no one operation: results for each of several sources, and errors."""

from __future__ import annotations

from typing import Any

from zeus_ipc.wire import Message


class ErrorBody(Message):
    """What a reply carries under `error`, for the whole request or for one GPU."""

    code: str
    """Stable code, see `zeus_ipc.errors.ErrorCode`."""
    message: str
    """One sentence for a person: what failed, why, and what to do."""
    gpu: str | None = None
    """UUID of the GPU it is about, if it is about one."""
    details: dict[str, Any] = {}
    """Further facts by name. Where a device refused: `outcome` (invalid, busy, lost, denied,
    unsupported, transient, unchanged), `device_code` and `device_call`, as its vendor has them."""


class Refused(Message):
    """What a reply carries for a GPU, or another source, that the request failed on."""

    error: ErrorBody


class Results(Message):
    """Result of a request for several GPUs: what it comes to on each, or `Refused`."""

    gpus: dict[str, Any]
    """By UUID."""


class PastResults(Message):
    """Result of `windows` and `timeline`: what it comes to for each source, or `Refused`."""

    sources: dict[str, Any]
    """By its name."""


class Done(Message):
    """Result for one GPU of a request that has no other: it was done."""


class Deferred(Message):
    """What a reply carries under `deferred` when sets with `block=False` have failed since."""

    count: int
    """How many have failed since the last report."""
    last: ErrorBody
    """The newest."""
