"""Encodes and decodes messages, with every size checked before memory is allocated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgpack

from zeus_ipc.errors import RequestRejected
from zeus_ipc.parsing import MAX_DEPTH, Malformed, bounded
from zeus_ipc.wire import MAX_REQUEST_BYTES, Message

_unpack = partial(msgpack.unpackb, raw=False, strict_map_key=True, max_bin_len=0, max_ext_len=0)
_unpack_request = partial(
    _unpack, max_str_len=MAX_REQUEST_BYTES, max_array_len=1024, max_map_len=32
)
_unpack_reply = partial(_unpack, max_str_len=65536, max_array_len=65536, max_map_len=4096)
_CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""With what maps and lists begin in MessagePack; numbers and text beyond ASCII have them, too."""


def encode(message: Mapping[str, Any] | Message) -> bytes:
    """One message as bytes. Thread-safe: a packer has state, so each call creates one."""
    data: bytes = msgpack.Packer(default=_fields).pack(message)
    return data


def _fields(one: object) -> dict[str, Any] | int:
    """A message as a map, without fields that have their default; NumPy's integers as integers."""
    if isinstance(one, Message):
        values, given = vars(one), one.__pydantic_fields_set__
        if len(given) == len(values):
            return values
        return {name: value for name, value in values.items() if name in given}
    if hasattr(one, "__index__") and not isinstance(one, int):
        return operator.index(one)
    if isinstance(one, int):
        raise RequestRejected("a number is too large for a request; choose a smaller one")
    raise TypeError(f"{type(one).__name__} {one!r:.40} cannot be part of a request")


def decode_request(data: bytes | memoryview) -> dict[str, Any]:
    """Decodes a request. Bounds follow the largest valid request, not the largest message.

    Raises:
        Malformed: It is not MessagePack, not a map, or beyond a bound.
    """
    return _decode(_unpack_request, data)


def id_of(data: bytes | memoryview) -> object:
    """The id in a request that cannot be decoded, so that its sender learns why; 0: it has none."""
    # Its buffer is as large as it may get.
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_REQUEST_BYTES, max_array_len=0)
    try:
        unpacker.feed(data)
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                return unpacker.unpack()
            unpacker.skip()  # takes no memory
    except Exception:  # noqa: BLE001 - as in `_decode`
        pass
    return 0


def decode_reply(data: bytes | memoryview) -> dict[str, Any]:
    """Decodes a reply. Replies come from the daemon and are bounded by its message size.

    Raises:
        Malformed: It is not MessagePack, not a map, or beyond a bound.
    """
    return _decode(_unpack_reply, data)


def _decode(
    unpack: Callable[[bytes | memoryview], Any], data: bytes | memoryview
) -> dict[str, Any]:
    try:
        value = unpack(data)
        raw = bytes(data)
        # Almost no message has enough containers to be too deep; so most are not walked.
        if len(raw) - len(raw.translate(None, _CONTAINERS)) > MAX_DEPTH:
            bounded(value)
    except Exception as error:  # noqa: BLE001 - msgpack raises five unrelated types on bad input
        why = str(error)[:200] or type(error).__name__
        raise Malformed(f"not a valid message: {why}") from None
    if not isinstance(value, dict):
        raise Malformed("not a valid message: the top level is not a map")
    return value
