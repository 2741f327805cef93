"""A member of etcd for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import needs
from tests.support import wait_for


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def running_etcd() -> Iterator[str]:
    """One member; yields `host:port`."""
    program = needs.tool("etcd")
    with tempfile.TemporaryDirectory() as name:
        for attempt in range(5):  # somebody else may take a port meanwhile
            client, peer = _free_ports(2)
            log = Path(name, f"log{attempt}")
            process = _start(program, Path(name, f"data{attempt}"), client, peer, log)
            try:
                wait_for(lambda: _answers(process, client), "etcd to answer")
                if process.poll() is None:
                    yield f"127.0.0.1:{client}"
                    return
            finally:
                process.kill()
                process.wait()
        raise AssertionError(f"etcd did not start:\n{log.read_text()}")


def _start(program: str, data: Path, client: int, peer: int, log: Path) -> subprocess.Popen[bytes]:
    command = [program, "--data-dir", str(data)]
    for what, port in (("client", client), ("peer", peer)):
        command += [f"--listen-{what}-urls", f"http://127.0.0.1:{port}"]
    command += ["--advertise-client-urls", f"http://127.0.0.1:{client}"]
    command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
    command += ["--initial-cluster", f"default=http://127.0.0.1:{peer}"]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream)


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether it listens, or has ended."""
    with socket.socket() as one:
        return process.poll() is not None or one.connect_ex(("127.0.0.1", port)) == 0
