"""The protocol engine: its events for bytes that are cut anywhere, and its refusals."""

from __future__ import annotations

import pytest

from tests import seeds
from tests.zeusd.server.fuzzing import fuzz
from tests.zmtp_peer import (
    GREETING,
    GREETING_30,
    NULL,
    command,
    frame,
    hello,
    prop,
    ready,
)
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeusd.server.zmtp import (
    MAX_COMMAND_BYTES,
    MAX_TOPIC_BYTES,
    READ_BYTES,
    Cancel,
    Event,
    HandshakeDone,
    Ignored,
    ProtocolError,
    RequestFrame,
    Role,
    Subscribe,
    ZmtpEngine,
    publication,
)


def events(engine: ZmtpEngine, data: bytes) -> list[Event]:
    engine.receive(data)
    found = []
    while (event := engine.next_event()) is not None:
        found.append(event)
    return found


def traffic(role: Role = Role.ROUTER, kind: bytes = b"DEALER") -> ZmtpEngine:
    """An engine whose handshake is over."""
    engine = ZmtpEngine(role)
    assert events(engine, hello(kind)) == [HandshakeDone(kind)]
    engine.data_to_send()
    return engine


def test_the_whole_greeting_is_sent_before_the_peer_says_a_word() -> None:
    engine = ZmtpEngine(Role.ROUTER)
    greeting = engine.data_to_send()
    assert (len(greeting), greeting[0], greeting[9]) == (64, 0xFF, 0x7F)
    assert greeting[10:32] == b"\x03\x01" + NULL
    assert engine.data_to_send() == b""


@pytest.mark.parametrize("greeting", [GREETING, GREETING_30])
def test_a_dealer_shakes_hands_and_is_answered(greeting: bytes) -> None:
    engine = ZmtpEngine(Role.ROUTER)
    engine.data_to_send()
    assert events(engine, greeting + ready()) == [HandshakeDone(b"DEALER")]
    expected = prop(b"Socket-Type", b"ROUTER") + prop(b"Identity", b"")
    assert engine.data_to_send() == command(b"READY", expected)
    assert events(engine, frame(b"one") + frame(b"two" * 200)) == [
        RequestFrame(b"one"),
        RequestFrame(b"two" * 200),
    ]
    assert engine.reply(b"r" * 300) == frame(b"r" * 300)


def test_a_req_has_its_delimiter_both_ways() -> None:
    engine = traffic(kind=b"REQ")
    assert events(engine, frame(b"", 1) + frame(b"ask")) == [RequestFrame(b"ask")]
    assert events(engine, frame(b"", 1)) == []
    assert events(engine, frame(b"again")) == [RequestFrame(b"again")]
    assert engine.reply(b"answer") == frame(b"", 1) + frame(b"answer")


@pytest.mark.parametrize("kind", [b"SUB", b"XSUB"])
def test_subscriptions_come_as_commands_and_as_messages(kind: bytes) -> None:
    engine = traffic(Role.PUB, kind)
    data = command(b"SUBSCRIBE", b"GPU-1") + command(b"CANCEL", b"GPU-1")
    data += frame(b"\x01GPU-2") + frame(b"\x00GPU-2")
    assert events(engine, data) == [
        Subscribe(b"GPU-1"),
        Cancel(b"GPU-1"),
        Subscribe(b"GPU-2"),
        Cancel(b"GPU-2"),
    ]
    assert publication(b"t", b"p") == frame(b"t", 1) + frame(b"p")


def test_a_ping_is_answered_with_its_context() -> None:
    engine = traffic()
    assert events(engine, command(b"PING", b"\x00\x64" + b"context")) == [Ignored()]
    assert engine.data_to_send() == command(b"PONG", b"context")
    assert events(engine, command(b"PING", b"\x00\x00" + b"x" * 100)) == [Ignored()]
    assert engine.data_to_send() == command(b"PONG", b"x" * 16), "more than the protocol allows"


def test_unknown_commands_are_ignored() -> None:
    engine = traffic()
    assert events(engine, command(b"PONG", b"x") + command(b"NEWS", b"y")) == [Ignored()] * 2
    assert engine.data_to_send() == b""


BROKEN_HANDSHAKES = {
    "not ZMTP": b"GET / HTTP/1.1\r\n",
    "not ZMTP, after its first bytes": b"\xff" + bytes(8) + b"\x7e",
    "ZMTP 1": b"\xff" + bytes(8) + b"\x7f\x00",
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01",
    "CURVE": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0"),
    "message before READY": GREETING + b"\x00\x01x",
    "command before READY": GREETING + command(b"PING", b"\0\0"),
    "ERROR": GREETING + command(b"ERROR", b"\x03bad"),
    "READY twice": hello() + ready(),
    "ERROR later": hello() + command(b"ERROR", b"\x03bad"),
    "wrong socket type": hello(b"PUB"),
    "no socket type": GREETING + command(b"READY", prop(b"Identity", b"")),
    "metadata cut short": GREETING + command(b"READY", prop(b"Socket-Type", b"DEALER")[:-1]),
    "metadata without a name": GREETING + command(b"READY", prop(b"", b"x")),
    "metadata without a length": GREETING + command(b"READY", b"\x01a\0\0"),
    "command without a name": hello() + frame(b"\x00", 4),
    "command shorter than its name": hello() + frame(b"\x09PING", 4),
    "empty command": hello() + b"\x04\x00",
    "command in parts": hello() + b"\x05\x05",
    "reserved flag": hello() + b"\x08\x00",
    "several parts": hello() + frame(b"x", 1),
    "an empty first part": hello() + frame(b"", 1),
    "PING without a TTL": hello() + command(b"PING", b"\0"),
    "subscription to a router": hello() + command(b"SUBSCRIBE", b"x"),
    "REQ without delimiter": hello(b"REQ") + frame(b"x"),
    "REQ with two": hello(b"REQ") + frame(b"", 1) + frame(b"", 1),
    "REQ with a name": hello(b"REQ") + frame(b"route", 1),
}


@pytest.mark.parametrize("data", BROKEN_HANDSHAKES.values(), ids=BROKEN_HANDSHAKES)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_violations_of_the_protocol_are_refused(data: bytes, step: int) -> None:
    engine = ZmtpEngine(Role.ROUTER)
    with pytest.raises(ProtocolError):
        for start in range(0, len(data), step):
            events(engine, data[start : start + step])


@pytest.mark.parametrize(
    ("role", "kind", "header"),
    [
        (Role.ROUTER, b"DEALER", b"\x02" + (MAX_REQUEST_BYTES + 1).to_bytes(8, "big")),
        (Role.ROUTER, b"DEALER", b"\x02" + (2**63).to_bytes(8, "big")),
        (Role.ROUTER, b"DEALER", b"\x06" + (MAX_COMMAND_BYTES + 1).to_bytes(8, "big")),
        (Role.ROUTER, b"DEALER", b"\x03" + (5).to_bytes(8, "big")),
        (Role.PUB, b"SUB", bytes([0, MAX_TOPIC_BYTES + 2])),
    ],
)
def test_too_much_is_refused_by_its_header(role: Role, kind: bytes, header: bytes) -> None:
    """Before a byte of the body has come, or been waited for."""
    with pytest.raises(ProtocolError):
        events(traffic(role, kind), header)


def test_the_largest_request_passes() -> None:
    body = b"z" * MAX_REQUEST_BYTES
    assert len(frame(body)) == READ_BYTES
    assert events(traffic(), frame(body)) == [RequestFrame(body)]


def test_a_publisher_takes_no_messages_and_no_long_topics() -> None:
    for data in (frame(b"\x02x"), frame(b""), command(b"SUBSCRIBE", b"x" * (MAX_TOPIC_BYTES + 1))):
        with pytest.raises(ProtocolError):
            events(traffic(Role.PUB, b"SUB"), data)


def test_damaged_conversations_mean_the_same_however_they_are_cut() -> None:
    seed = seeds.fresh()
    refused = fuzz(seed, 4_000)
    assert 400 < refused < 3_900, "some are taken, and some are not"
