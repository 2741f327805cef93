from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest

from zeusd import systemd
from zeusd.server import descriptors
from zeusd.server.listener import MAX_PATH, Listener, ListenError


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "s")
    old = os.umask(0o022)
    try:
        Listener(path, 0o600, None).close()  # makes its folder, which every user may enter
        os.umask(0o077)
        listener = Listener(path, 0o666, None)
    finally:
        os.umask(old)
    assert os.stat(path).st_mode & 0o777 == 0o666
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o755
    assert connects(path)
    listener.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize("stale", [False, True])
def test_the_path_appears_complete_and_when_clients_can_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    path = str(tmp_path / "s")
    if stale:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
    before = os.lstat(path) if stale else None
    group = os.getgid() + (os.getuid() == 0)
    listen, rename, seen = socket.socket.listen, os.rename, []

    def watched_listen(self: socket.socket, backlog: int) -> None:
        assert (os.lstat(path) if os.path.lexists(path) else None) == before
        listen(self, backlog)
        seen.append("listen")

    def watched_rename(source: str, target: str) -> None:
        assert target == path
        assert connects(source)
        found = os.stat(source)
        assert (found.st_mode & 0o777, found.st_gid) == (0o666, group)
        rename(source, target)
        seen.append("rename")

    monkeypatch.setattr(socket.socket, "listen", watched_listen)
    monkeypatch.setattr(os, "rename", watched_rename)
    listener = Listener(path, 0o666, str(group))
    assert seen == ["listen", "rename"]
    assert connects(path)
    assert sorted(os.listdir(tmp_path)) == ["s", "s.lock"]
    listener.close()
    assert os.listdir(tmp_path) == ["s.lock"]


def test_what_a_killed_or_failed_start_leaves_does_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path + "~")  # killed before it listened
    Listener(path, 0o600, None).close()
    assert os.listdir(tmp_path) == ["s.lock"]

    def chown(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(os, "chown", chown)
        words = f"cannot listen at {path} (Operation not permitted); check --socket and"
        with pytest.raises(ListenError, match=re.escape(words)):
            Listener(path, 0o600, "0")
    assert os.listdir(tmp_path) == ["s.lock"]
    (tmp_path / "s~").write_text("precious")
    with pytest.raises(ListenError, match="s~ exists and is not a socket"):
        Listener(path, 0o600, None)
    assert (tmp_path / "s~").read_text() == "precious"


def test_a_path_of_the_greatest_length_works(tmp_path: Path) -> None:
    path = str(tmp_path / "s") + "x" * (MAX_PATH - len(str(tmp_path / "s")))
    listener = Listener(path, 0o600, None)
    assert connects(path)
    listener.close()


def test_it_does_not_remove_a_socket_that_replaced_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listener = Listener(path, 0o600, None)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        listener.close()
        assert connects(path)


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
    with pytest.raises(ListenError, match="longer than 106 bytes"):
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
