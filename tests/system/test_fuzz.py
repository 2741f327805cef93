"""No input crashes the daemon, or grows its memory without bound."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import seeds
from tests.support import RunningDaemon, configuration, running_daemon, wait_for
from tests.zmtp_peer import shaken
from zeus_ipc import Client, errors
from zeus_ipc.codec import decode_reply, decode_request
from zeus_ipc.operations import OPERATIONS
from zeus_ipc.parsing import Malformed
from zeus_ipc.wire import MAX_REQUEST_BYTES, PROTOCOL_VERSION
from zeusd.records import header, replay
from zeusd.server.decoding import Invalid, decode

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=20,
)
FIELDS = (
    *("gpus", "controls", "control", "block", "value"),
    *(
        "deadline_ns",
        "client",
        "ttl_ms",
        "whose",
        "pids",
        "job",
        "after",
        "limit",
        "client_version",
    ),
    *("sources", "windows", "domain", "start_ns", "end_ns", "limit"),
)
almost_requests = st.builds(
    lambda known, more: {**more, **known},
    st.fixed_dictionaries(
        {
            "v": st.just(PROTOCOL_VERSION),
            "id": st.integers(0, 9),
            "op": st.sampled_from([*OPERATIONS]) | values,
        }
    ),
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=6),
)
FUZZ = settings(
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(st.binary(max_size=2048))
@FUZZ
def test_any_bytes_are_a_map_or_refused(data: bytes) -> None:
    for decoder in (decode_request, decode_reply):
        with contextlib.suppress(Malformed):
            assert isinstance(decoder(data), dict)


@given(values)
@FUZZ
def test_any_message_is_valid_or_answered(value: object) -> None:
    with pytest.raises(Invalid) as refused:
        decode(msgpack.packb(value, use_bin_type=True))
    assert set(refused.value.reply) == {"v", "id", "error"}
    assert len(str(refused.value.reply)) < 4096


@given(almost_requests)
@FUZZ
def test_almost_requests_are_valid_or_answered_shortly(message: dict[str, object]) -> None:
    reply: dict[str, object] = {}
    try:
        decode(msgpack.packb(message, use_bin_type=True))
    except Invalid as refused:
        reply = refused.reply
    assert reply.get("id", 0) in (message["id"], 0)
    assert len(str(reply)) < 4096


@given(st.lists(st.binary(max_size=200).map(lambda data: data.replace(b"\n", b"")), max_size=20))
@FUZZ
def test_any_journal_is_read(lines: list[bytes]) -> None:
    for first in (b"", b'{"format": 1, "boot": "boot"}\n', header("boot")):
        said = replay(first + b"\n".join(lines), "boot")
        assert all(isinstance(entry, dict) for entry in said.entries.values())


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that limits no rates, so that it reads all of the garbage."""
    limits = configuration(tmp_path_factory.mktemp("fuzz"), "[server]\nrequests_per_second = 1e6\n")
    with running_daemon("--simulate", "2xv100-pcie:setter_ms=0", *limits, gpus=2) as running:
        yield running


def _garbage(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    message = {"v": 1, "id": rng.randrange(9), "op": rng.choice([*OPERATIONS])}
    for name in rng.sample(("gpus", "control", "controls", "value", "client"), 3):
        message[name] = rng.choice((None, 1, -1, 2**60, "x" * 250, [], ["GPU-x"] * 60, {}, 1.5))
    data = bytearray(msgpack.packb(message))
    for _ in range(rng.randrange(4) if kind > 1 else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def faults(client: Client) -> int:
    """How often connections were closed because they broke the protocol."""
    return sum(user.faults for user in client.metrics().users)


def settle(client: Client) -> None:
    """Undoes what garbage may have requested; a `quiesce` may still be in progress."""

    def settled() -> bool:
        # A quiesce that waited for its turn may come between the two.
        with contextlib.suppress(errors.DaemonOverloaded, errors.NodeQuiesced):
            if client.resume().quiesced_ns is None:
                client.restore()
                return True
        return False

    wait_for(settled, "the driver to be taken up and all limits to be back")


def test_a_live_daemon_takes_anything_and_stays_what_it_was(daemon: RunningDaemon) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    sizes = []
    for _ in range(4):
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{daemon.socket}")
            for _ in range(1500):
                dealer.send(_garbage(rng))
                with contextlib.suppress(zmq.Again):
                    while True:
                        assert isinstance(decode_reply(dealer.recv(zmq.NOBLOCK)), dict)
        context.term()
        with daemon.client() as client:
            settle(client)
            assert len(client.node().gpus) == 2
        sizes.append(rss_kib(daemon.process.pid))
    assert daemon.process.poll() is None
    assert sizes[-1] - sizes[1] < 8_192, f"memory grows: {sizes} KiB"


@pytest.mark.parametrize("suffix", ["", ".stream"])
def test_broken_streams_leave_nothing_behind(daemon: RunningDaemon, suffix: str) -> None:
    """Handshakes cut short or scrambled, frames too long, connections opened and dropped."""
    seed = seeds.fresh()
    rng = random.Random(seed)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    wait_for(lambda: descriptors() < 60, "earlier connections to be gone")
    before = descriptors()
    for _ in range(400):
        kind = rng.randrange(4)
        with contextlib.suppress(OSError, IndexError):
            if kind < 2:
                with socket.socket(socket.AF_UNIX) as stream:
                    stream.connect(daemon.socket + suffix)
                    stream.sendall(rng.randbytes(rng.randrange(1, 200)))
            else:
                with shaken(daemon.socket + suffix) as stream:
                    size = MAX_REQUEST_BYTES * 2 if kind == 2 else rng.randrange(1, 255)
                    header = b"\x02" + size.to_bytes(8, "big") if kind == 2 else bytes([0, size])
                    stream.sendall(header + rng.randbytes(rng.randrange(size)))
    wait_for(lambda: descriptors() <= before + 2, "the descriptors to be closed")
    with daemon.client() as client:
        assert len(client.node().gpus) == 2


def test_a_flood_of_subscriptions_is_closed_and_leaves_no_memory(daemon: RunningDaemon) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    before = rss_kib(daemon.process.pid)
    with daemon.client() as client:
        broken = faults(client)
    with zmq.Context() as context, context.socket(zmq.SUB) as flooder:
        flooder.setsockopt(zmq.LINGER, 0)
        flooder.setsockopt(zmq.SNDHWM, 0)
        flooder.connect(f"ipc://{daemon.socket}.stream")
        for _ in range(50_000):
            flooder.setsockopt(zmq.SUBSCRIBE, rng.randbytes(80))
        with daemon.client() as client:
            wait_for(lambda: faults(client) > broken, "the flooder to be closed")
    with daemon.client() as client:
        settle(client)
        with client.stream(client.node().gpus[0].uuid) as stream:
            assert stream.receive(10.0) is not None
    assert rss_kib(daemon.process.pid) - before < 16_384
