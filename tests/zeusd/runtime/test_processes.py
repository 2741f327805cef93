from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    NOBODY,
    TIMEOUT_S,
    as_nobody,
    ending,
    pidfds_are_closed,  # noqa: F401 - a fixture
    public_directory,
    wait_for,
)
from zeusd.core.model import Peer, ProcessIdentity
from zeusd.identity import pidfd_inodes_are_unique, process_cookie
from zeusd.runtime.identities import Identities
from zeusd.runtime.processes import (
    NoSuchPeer,
    ProcessWatch,
    identify_peer,
    open_process,
    own_process,
    usage_of,
)
from zeusd.runtime.reactor import Reactor


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", "input()"]
    with ending(subprocess.Popen(command, stdin=subprocess.PIPE)) as process:
        yield process


def process_of(pid: int) -> ProcessIdentity:
    pidfd = os.pidfd_open(pid)
    try:
        return ProcessIdentity(pid, process_cookie(pid, pidfd, pidfd_inodes_are_unique()))
    finally:
        os.close(pidfd)


CLIENT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


@contextlib.contextmanager
def connected(
    tmp_path: Path, *wrapper: str, before: str = "", **options: Any
) -> Iterator[tuple[Peer, Any]]:
    """A client that connected, and its identity by the kernel; `before` is its first action."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        os.chmod(path, 0o777)
        listening.listen()
        listening.settimeout(TIMEOUT_S)
        command = [*wrapper, sys.executable, "-I", "-S", "-c", before + CLIENT, path]
        with ending(subprocess.Popen(command, **options)) as client:
            connection, _ = listening.accept()
            with connection:
                peer, pidfd = identify_peer(7, connection)
                assert not os.get_inheritable(pidfd)
                try:
                    yield peer, client
                finally:
                    os.close(pidfd)


def test_the_kernel_identifies_the_client(tmp_path: Path) -> None:
    with connected(tmp_path) as (peer, client):
        assert (peer.conn, peer.process.pid) == (7, client.pid)
        assert (peer.uid, peer.gid) == (os.getuid(), os.getgid())
        assert peer.groups == {os.getgid(), *os.getgroups()}
        assert peer.on_host
        pidfd = open_process(peer.process)
        os.close(pidfd)
        client.kill()
        client.wait()
        assert open_process(peer.process) is None


def test_a_programs_name_is_one_plain_line(tmp_path: Path) -> None:
    name = b"\x1b[31mroot\n1 GPU"
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); "
    with connected(tmp_path, before=rename) as (peer, _):
        assert peer.command == "?[31mroot?1 GPU"


NAMES = ("обучение".encode()[:15], b"\xff\xfe", b"\rUid:\t4321", b"a) R 1 2 3")
"""The kernel cuts a name after 15 bytes, in the middle of a character if need be."""


@pytest.mark.parametrize("name", NAMES)
def test_a_process_is_known_whatever_its_name(tmp_path: Path, name: bytes) -> None:
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); "
    with connected(tmp_path, before=rename) as (peer, client):
        assert usage_of(peer.process) is not None
        pidfd = os.pidfd_open(client.pid)
        found = Identities().identify(client.pid)
        assert process_cookie(client.pid, pidfd, unique_inodes=False) == found.start_ticks
        assert found.account.uid in (os.getuid(), -1)  # a service, where the tests run in one
        os.close(pidfd)
        os.close(found.pidfd)


@pytest.mark.needs("root")
def test_all_groups_of_the_peer_are_known() -> None:
    many = list(range(3000, 3700))
    with public_directory() as directory:
        nobody = {**as_nobody(), "extra_groups": many}
        with connected(directory, **nobody) as (peer, _):
            assert peer.uid == NOBODY
            assert peer.groups == {NOBODY, *many}


@pytest.mark.needs("namespaces")
def test_a_process_in_its_own_pid_namespace_is_not_on_the_host(tmp_path: Path) -> None:
    with connected(tmp_path, "unshare", "--pid", "--fork", "--kill-child") as (peer, _):
        assert peer.uid == 0
        assert not peer.on_host


def test_a_process_in_a_foreign_pid_namespace_is_unknown() -> None:
    """The kernel then has no number for it; the server refuses its requests."""

    class Foreign(socket.socket):
        def getsockopt(self, *asked: Any) -> Any:
            return struct.pack("3i", 0, 1000, 1000)

    with Foreign(socket.AF_UNIX) as connection, pytest.raises(NoSuchPeer, match="pid namespace"):
        identify_peer(1, connection)


@pytest.mark.needs("user namespaces")
def test_root_in_a_user_namespace_has_the_kernels_identity() -> None:
    with public_directory() as directory:
        wrapper = ("unshare", "--user", "--map-root-user")
        with connected(directory, *wrapper, **as_nobody()) as (peer, _):
            assert peer.uid == (NOBODY if os.getuid() == 0 else os.getuid())


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
    os.close(pidfd)
    assert open_process(ProcessIdentity(own.pid, own.cookie + 1)) is None


def test_death_is_reported_once_and_only_while_watched(sleeper: subprocess.Popen[bytes]) -> None:
    reactor = Reactor()
    gone: list[ProcessIdentity] = []
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
    watch.unwatch(process)  # without `close`: `pidfds_are_closed` sees that this closed it
    reactor.close()


def test_a_process_that_is_gone_before_it_is_watched_is_reported(
    sleeper: subprocess.Popen[bytes],
) -> None:
    reactor = Reactor()
    gone: list[ProcessIdentity] = []
    watch = ProcessWatch(reactor, lambda process: (gone.append(process), reactor.stop())[0])
    process = process_of(sleeper.pid)
    watch.watch(process)
    reactor.run(lambda: None, lambda: None)
    assert gone == [process]
    reactor.close()


STARVED = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


def test_a_process_that_waits_for_a_cpu_counts_as_busy() -> None:
    core = {min(os.sched_getaffinity(0))}
    commands = ("while True: pass", STARVED)
    rival, starved = (subprocess.Popen([sys.executable, "-c", command]) for command in commands)
    try:
        for process in (rival, starved):
            os.sched_setaffinity(process.pid, core)
        known = process_of(starved.pid)

        def waited_ns() -> int:
            return int(Path(f"/proc/{starved.pid}/schedstat").read_text().split()[1])

        wait_for(lambda: waited_ns() > 300_000_000, "it to wait for the CPU")
        waited = waited_ns()
        usage = usage_of(known)
        assert usage.cpu_ns >= waited
        assert not usage.stopped
    finally:
        for process in (rival, starved):
            process.kill()
            process.wait()
