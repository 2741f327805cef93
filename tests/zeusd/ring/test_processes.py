from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeusd.core.model import Process
from zeusd.ring import processes
from zeusd.ring.processes import ProcessWatch, identify_peer, open_process, own_process
from zeusd.ring.reactor import Reactor


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def process_of(pid: int) -> Process:
    pidfd = os.pidfd_open(pid)
    try:
        return Process(pid, processes._cookie(pid, pidfd))
    finally:
        os.close(pidfd)


def test_the_kernel_says_who_connected(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        client = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.recv(1)",
            ]
        )
        connection, _ = listening.accept()
        process, uid, gid, pidfd = identify_peer(connection)
        assert (process.pid, uid, gid) == (client.pid, os.getuid(), os.getgid())
        assert open_process(process) is not None
        client.kill()
        client.wait()
        assert open_process(process) is None
        os.close(pidfd)
        connection.close()


def test_a_zombie_has_exited(sleeper: subprocess.Popen[bytes]) -> None:
    process = process_of(sleeper.pid)
    pidfd = os.pidfd_open(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert Path(f"/proc/{sleeper.pid}").exists()
    assert open_process(process) is None
    os.close(pidfd)


def test_a_process_of_another_cookie_is_another_process() -> None:
    own = own_process()
    assert own.pid == os.getpid()
    pidfd = open_process(own)
    assert pidfd is not None
    os.close(pidfd)
    assert open_process(Process(own.pid, own.cookie + 1)) is None


def test_death_is_reported_once_and_only_while_watched(sleeper: subprocess.Popen[bytes]) -> None:
    reactor = Reactor()
    gone: list[Process] = []
    watch = ProcessWatch(reactor, lambda process: (gone.append(process), reactor.stop())[0])
    process = process_of(sleeper.pid)
    watch.attach(process, os.pidfd_open(sleeper.pid))
    watch.watch(process)
    watch.watch(process)
    watch.detach(process)
    watch.unwatch(process)
    sleeper.kill()
    reactor.run(lambda: None, lambda: None)
    assert gone == [process]
    watch.unwatch(process)
    watch.close()
    reactor.close()


def test_a_process_that_is_gone_before_it_is_watched_is_reported(
    sleeper: subprocess.Popen[bytes],
) -> None:
    reactor = Reactor()
    gone: list[Process] = []
    watch = ProcessWatch(reactor, lambda process: (gone.append(process), reactor.stop())[0])
    process = process_of(sleeper.pid)
    watch.watch(process)
    reactor.run(lambda: None, lambda: None)
    assert gone == [process]
    reactor.close()
