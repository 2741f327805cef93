"""The protocol between a client and zeusd: every message, every field, its unit and its meaning.

One message is one msgpack map. A client sends a `Request`; the daemon answers with one reply that
carries the same `id`: `{"v": 1, "id": 7, "result": {...}}` or `{"v": 1, "id": 7, "error": {...}}`
(see `ErrorBody`). A set with `block=False` gets no reply; what failed of it is counted and told in
the field `deferred` of the next reply on that connection (see `Deferred`).

Units: milliwatts, millijoules, megahertz, degrees Celsius, and nanoseconds of CLOCK_MONOTONIC,
which client and daemon share because they run on one node. A GPU is named by its NVML UUID.
Fields that a reader does not know are ignored. Who is asking is never in a message: the daemon asks
the kernel.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from zeus_ipc import controls
from zeus_ipc.controls import Control

PROTOCOL_VERSION = 1
"""The version this code speaks. A daemon answers an unknown one by naming those it speaks."""

MAX_REQUEST_BYTES = 16 * 1024
"""Largest request. libzmq drops a connection that sends a longer frame."""

Uuid = Annotated[str, Field(min_length=1, max_length=96)]
"""NVML UUID of a whole GPU, such as `GPU-1f2e...`."""

Gpus = Annotated[list[Uuid], Field(min_length=1, max_length=64)]
"""GPUs that the request is for. Each gets a result of its own."""

MegaHertz = Annotated[int, Field(ge=0, le=controls.MAX_MHZ)]
MilliWatts = Annotated[int, Field(ge=1, le=controls.MAX_MW)]


ControlName = Annotated[Control, Field(strict=False)]
"""A control by its name: strict validation alone would ask for the enum member."""


class Message(BaseModel):
    """A map on the wire. Fields that a reader does not know are ignored."""

    # Built when first used: a client that asks for little does not pay for all.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)
