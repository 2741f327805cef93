"""The protocol between a client and zeusd: every message, every field, its unit and its meaning.

One message is one msgpack map. A client sends a `Request`; the daemon answers with one reply that
carries the same `id`: `{"v": 1, "id": 7, "result": {...}}` or `{"v": 1, "id": 7, "error": {...}}`
(see `ErrorBody`). A set with `block=False` gets no reply; its failure is counted and reported in
the field `deferred` of the next reply to the same client object (see `Deferred`).

Units: milliwatts, millijoules, megahertz, degrees Celsius, and nanoseconds of CLOCK_MONOTONIC,
which client and daemon share because they run on one node. A GPU is named by its NVML UUID. Readers
ignore unknown fields. A message never says who sent it: the daemon asks the kernel.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from zeus_ipc import controls
from zeus_ipc.controls import Control

PROTOCOL_VERSION = 1
"""The version of this code. A daemon answers an unknown version with those it supports."""

MAX_REQUEST_BYTES = 16 * 1024
"""Largest request. libzmq drops a connection that sends a longer frame."""

Uuid = Annotated[str, Field(min_length=1, max_length=96)]
"""NVML UUID of a whole GPU, such as `GPU-1f2e...`."""

Gpus = Annotated[list[Uuid], Field(min_length=1, max_length=64)]
"""GPUs that the request is for, each with a result of its own."""


def matching(pattern: str, rule: str) -> AfterValidator:
    """Accepts strings that match a pattern; others get an error with the rule in words."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"{value!r:.80} is not valid; {rule}")
        return value

    return AfterValidator(check)


MegaHertz = Annotated[int, Field(ge=0, le=controls.MAX_MHZ)]
MilliWatts = Annotated[int, Field(ge=1, le=controls.MAX_MW)]

ControlName = Annotated[Control, Field(strict=False)]
"""A control by its name: strict validation would require the enum member."""


class Message(BaseModel):
    """A map on the wire. Unknown fields are ignored."""

    # Built on first use: a client pays only for the messages that it uses.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)
