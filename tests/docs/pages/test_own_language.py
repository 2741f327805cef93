"""The worked bytes are what client and daemon say, and the client in C works."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests import needs
from tests.docs.pages.following import DOCS
from tests.snippets import ROOT, every
from tests.support import TIMEOUT_S, RunningDaemon, running_daemon, wait_for
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.replies import ErrorBody, HeartbeatResult, NodeInfo
from zeus_ipc.requests import request_adapter

PAGE = DOCS / "integrate" / "own_language.md"
_TTL_S = 0.6


def _frames() -> list[bytes]:
    """The bytes of the examples, without comments."""
    return [
        bytes.fromhex("".join(line.partition("#")[0] for line in block.source.splitlines()))
        for block in every(PAGE)
        if block.language == "hex"
    ]


FRAMES = _frames()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    config = tmp_path_factory.mktemp("own_language") / "zeusd.toml"
    config.write_text(f"[lease]\nttl_s = {_TTL_S}\n")
    with running_daemon("--simulate", "v100-pcie", "--config", str(config), gpus=1) as running:
        yield running


def test_the_page_has_such_bytes() -> None:
    operations = [decode_reply(frame).get("op") for frame in FRAMES]
    assert {"hello", "set", "heartbeat", "state", "release"} <= set(operations)
    assert operations.count(None) >= 4  # replies


@pytest.mark.parametrize("frame", FRAMES, ids=[f"block{n}" for n in range(len(FRAMES))])
def test_the_bytes_are_the_codecs(frame: bytes) -> None:
    message = decode_reply(frame)
    assert encode(message) == frame
    if "op" in message:
        request = request_adapter.validate_python(message)
        said = request.model_dump(mode="json")
        assert {name: said[name] for name in message} == message
    elif "leases" in message["result"]:
        HeartbeatResult.model_validate(message["result"])
    else:
        for of_gpu in message["result"].get("gpus", {}).values():
            if "error" in of_gpu:
                ErrorBody.model_validate(of_gpu["error"])


def test_zeusd_answers_with_these_bytes(daemon: RunningDaemon) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        dealer.connect(f"ipc://{daemon.socket}")
        answer: dict[str, Any] = {}
        compared = 0
        for frame in FRAMES:
            message = decode_reply(frame)
            if "op" in message:
                if "deadline_ns" in message:
                    message["deadline_ns"] = time.monotonic_ns() + 60 * 10**9
                dealer.send(encode(message))
                answer = decode_reply(dealer.recv())
                assert answer["id"] == message["id"]
                continue
            if "ttl_ms" in message["result"]:  # of this test's own configuration
                answer["result"]["ttl_ms"] = message["result"]["ttl_ms"]
            assert encode(answer) == frame
            compared += 1
        assert compared >= 4


def test_the_reply_to_hello_has_what_the_page_shows(daemon: RunningDaemon) -> None:
    (shown,) = (block for block in every(PAGE) if block.language == "json")
    gpu = json.loads(shown.source)["result"]["gpus"][0]
    with daemon.client() as client:
        info: NodeInfo = client.node()
    real = info.gpus[0].model_dump()
    assert {name: real[name] for name in gpu} == gpu


# ------------------------------------------------------------------------------- the client in C


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was made with the page's own command."""
    (build,) = (
        line
        for block in every(PAGE)
        if block.language == "sh"
        for line in block.source.splitlines()
        if line.startswith("gcc ")
    )
    where = tmp_path_factory.mktemp("c")
    (where / "examples").symlink_to(ROOT / "examples")
    needs.require("gcc", "libzmq")
    made = subprocess.run([*build.split(), "-Werror"], cwd=where, stderr=subprocess.PIPE, text=True)
    assert made.returncode == 0, made.stderr
    return where


def _limit(folder: Path, daemon: RunningDaemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [folder / "limit", daemon.socket, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _limit_w(daemon: RunningDaemon) -> float:
    with daemon.client() as client:
        gpu = client.node().gpus[0].uuid
        limit_mw = client.state([gpu])[gpu].power_limit_mw
    assert limit_mw is not None
    return limit_mw / 1000


def test_it_prints_what_the_page_shows(folder: Path, daemon: RunningDaemon) -> None:
    ran = _limit(folder, daemon, "150", "0")
    printed, complaint = ran.communicate(timeout=TIMEOUT_S)
    assert (ran.returncode, complaint) == (0, "")
    (shown,) = (block for block in every(PAGE) if block.language == "text")
    assert printed == shown.source
    assert _limit_w(daemon) == 250


def test_heartbeats_keep_its_lease_and_its_death_ends_it(
    folder: Path, daemon: RunningDaemon
) -> None:
    ran = _limit(folder, daemon, "150", "600")
    try:
        with daemon.client() as client:

            def expiry_ns() -> int:
                leases = client.leases()
                return leases[0].expires_ns if leases else 0

            first_ns = wait_for(expiry_ns, "its lease")
            wait_for(lambda: expiry_ns() > first_ns + 2 * _TTL_S * 1e9, "its heartbeats")
            assert _limit_w(daemon) == 150
            ran.kill()
            wait_for(lambda: not client.leases(), "the end of its lease")
        assert _limit_w(daemon) == 250
    finally:
        ran.kill()
        ran.communicate()


def test_it_says_what_zeusd_refused(folder: Path, daemon: RunningDaemon) -> None:
    ran = _limit(folder, daemon, "50", "0")
    _, complaint = ran.communicate(timeout=TIMEOUT_S)
    assert ran.returncode == 1
    assert "outside 100 to 250 W" in complaint
