"""A fuzzer of the protocol engine: damaged conversations, cut in two ways, must mean the same.

    python -m tests.zeusd.server.fuzzing --inputs 10000000

A test runs some thousands; it prints its seed.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.zmtp_peer import GREETING, GREETING_30, command, frame, prop, ready
from zeusd.server.zmtp import READ_BYTES, Event, ProtocolError, Role, ZmtpEngine

PARTS = (
    GREETING,
    GREETING_30,
    *(ready(kind) for kind in (b"DEALER", b"REQ", b"SUB", b"XSUB", b"ROUTER", b"")),
    command(b"READY", prop(b"socket-type", b"DEALER") + prop(b"Identity", b"x" * 255)),
    frame(b""),
    frame(b"", 1),
    frame(b"\x01GPU-1"),
    frame(b"\x00GPU-1"),
    frame(b"z" * 300),
    frame(b"\x85" * 40, 1),
    command(b"SUBSCRIBE", b"GPU-1"),
    command(b"CANCEL", b"GPU-1"),
    command(b"PING", b"\0\1context"),
    command(b"PONG", b"context"),
    command(b"ERROR", b"\x03bad"),
    b"\x02" + (20_000).to_bytes(8, "big"),
    b"\x06" + (2**63 - 1).to_bytes(8, "big"),
    b"\xff",
)
STARTS = tuple(
    (role, greeting + ready(kind))
    for role, kinds in ((Role.ROUTER, (b"DEALER", b"REQ")), (Role.PUB, (b"SUB", b"XSUB")))
    for kind in kinds
    for greeting in (GREETING, GREETING_30)
)


def conversation(rng: random.Random) -> tuple[Role, bytes]:
    """Bytes of a hostile peer: parts of real conversations, with some bytes changed."""
    role, start = rng.choice(STARTS)
    data = bytearray(start if rng.random() < 0.8 else b"")
    for _ in range(rng.randrange(5)):
        data += rng.choice(PARTS) if rng.random() < 0.8 else rng.randbytes(rng.randrange(20))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        if data:
            # Most bugs are at the edges: flags, lengths, names.
            position = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[position] = rng.choice((0, 1, 2, 4, 5, 6, 8, 127, 255, rng.randrange(256)))
            else:
                del data[position : position + rng.randrange(1, 4)]
    return role, bytes(data)


def buffered(engine: ZmtpEngine) -> int:
    """Received bytes that are not part of an event yet."""
    return len(engine._buffer) - engine._position


def outcome(role: Role, data: bytes, cuts: list[int]) -> tuple[list[Event], str, bytes]:
    """Events, the refusal if there is one, and the bytes sent, for data cut at these places."""
    engine, events, refusal = ZmtpEngine(role), [], ""
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            engine.receive(data[begin:end])
            while (event := engine.next_event()) is not None:
                events.append(event)
            assert buffered(engine) < READ_BYTES, "more is kept than one incomplete frame"
    except ProtocolError as error:
        refusal = str(error)
    answer = engine.data_to_send()
    assert len(events) <= len(data) // 2
    assert len(answer) <= 128 + 20 * len(data), "an answer to little is short"
    return events, refusal, answer


def fuzz(seed: int, inputs: int) -> int:
    """Runs inputs. Returns how many were refused.

    Raises:
        AssertionError: The engine meant different things by the same bytes, or kept too much.
    """
    rng = random.Random(seed)
    refused = 0
    for number in range(inputs):
        role, data = conversation(rng)
        whole = outcome(role, data, [])
        size = max(1, len(data))
        cuts = sorted(rng.randrange(size) for _ in range(rng.randrange(1, 6)))
        parts = outcome(role, data, cuts)
        assert whole == parts, f"seed {seed}, input {number}: {role} {data!r} cut at {cuts}"
        refused += bool(whole[1])
    return refused


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    began = time.monotonic()
    refused = fuzz(options.seed, options.inputs)
    print(
        f"{options.inputs} inputs, {refused} of them refused, none meant two things, in "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
