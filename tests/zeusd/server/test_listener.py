from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from zeusd import systemd
from zeusd.server import descriptors
from zeusd.server.listener import Listener, ListenError


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    old = os.umask(0o077)
    try:
        listener = Listener(path, 0o666, None)
    finally:
        os.umask(old)
    assert os.stat(path).st_mode & 0o777 == 0o666
    assert connects(path)
    listener.close()
    assert not os.path.exists(path)


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    listener = Listener(path, 0o600, None)
    assert connects(path)
    listener.close()


def test_the_socket_of_a_running_daemon_is_not_touched(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Listener(path, 0o600, None)
    with pytest.raises(ListenError, match="another daemon listens"):
        Listener(path, 0o600, None)
    assert connects(path)
    first.close()


def test_a_socket_that_another_process_holds_without_our_lock_is_not_touched(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ListenError, match="another daemon listens"):
            Listener(path, 0o600, None)
        assert connects(path)


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        (tmp_path / "target").write_text("precious")
        path.symlink_to(tmp_path / "target")
    else:
        path.mkdir()
    with pytest.raises(ListenError, match="not a socket"):
        Listener(str(path), 0o600, None)
    assert path.exists()
    assert not (tmp_path / "s.lock").exists(), "/etc/passwd.lock would stop useradd"


def test_operator_errors_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="longer than 107 bytes"):
        Listener(str(tmp_path / ("x" * 120)), 0o600, None)
    with pytest.raises(ListenError, match="the group no-such-group does not exist"):
        Listener(str(tmp_path / "s"), 0o600, "no-such-group")
    with pytest.raises(ListenError, match="the group 99999999999 does not exist"):
        Listener(str(tmp_path / "s"), 0o600, "99999999999")
    with pytest.raises(ListenError, match="cannot listen at /proc/nowhere/s"):
        Listener("/proc/nowhere/s", 0o600, None)


def test_clients_that_connect_before_zeusd_accepts_may_not_send_descriptors_either(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    listener = Listener(path, 0o600, None)
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as refusing:
        client.connect(path)
        accepted, _ = listener.socket.accept()
        descriptors.refuse(refusing)  # as far as this kernel can
        with accepted:
            assert descriptors.may_carry(accepted) == descriptors.may_carry(refusing)
    listener.close()


@pytest.mark.parametrize(
    ("pid", "number"),
    [("own", "abc"), ("own", ""), ("own", "-1"), ("own", "0"), ("other", "1"), ("x", "1")],
)
def test_variables_that_systemd_does_not_set_for_this_process_change_nothing(
    monkeypatch: pytest.MonkeyPatch, pid: str, number: str
) -> None:
    pid = {"own": str(os.getpid()), "other": str(os.getppid())}.get(pid, pid)
    for name, value in (("FDS", number), ("PID", pid)):
        monkeypatch.setenv(f"LISTEN_{name}", value)
    for name, value in (("USEC", number), ("PID", pid)):
        monkeypatch.setenv(f"WATCHDOG_{name}", value)
    assert systemd.listening_sockets() == {}
    assert systemd.watchdog_s() is None


def test_the_watchdog_is_fed_when_systemd_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert systemd.watchdog_s() == 3.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert systemd.watchdog_s() == 3.0
