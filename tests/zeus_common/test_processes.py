"""Listening at a path, and programs that are run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeus.serving.receiver import Receiver
from zeus_common.processes import UnixListener, is_missing, output_of
from zeusd.devices.simulated import DeviceServer, SimulatedBackend


def devices(path: str) -> Callable[[], None]:
    server = DeviceServer(SimulatedBackend("v100"), path)
    server.start()
    return server.stop


def steps(path: str) -> Callable[[], None]:
    return Receiver(path, lambda message: True).close


@pytest.mark.parametrize(("opens", "mode"), [(devices, 0o666), (steps, 0o660)])
@pytest.mark.parametrize("stale", [False, True])
def test_a_client_that_finds_the_path_can_connect(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opens: Callable[[str], Callable[[], None]],
    mode: int,
    stale: bool,
) -> None:
    path = str(tmp_path / "s")
    if stale:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(path)
    before = os.lstat(path) if stale else None
    listen: Any = socket.socket.listen
    seen = []

    def watched(self: socket.socket, backlog: int) -> None:
        assert (os.lstat(path) if os.path.lexists(path) else None) == before
        listen(self, backlog)
        seen.append(backlog)

    monkeypatch.setattr(socket.socket, "listen", watched)
    close = opens(path)
    assert len(seen) == 1
    assert os.stat(path).st_mode & 0o777 == mode
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(path)
    close()
    assert os.listdir(tmp_path) == []


def test_of_two_that_open_a_path_at_once_at_most_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second uses the name of the first, which would rename the other's socket."""
    path = str(tmp_path / "s")
    listen: Any = socket.socket.listen
    others = []

    def listen_late(self: socket.socket, backlog: int) -> None:
        listen(self, backlog)
        monkeypatch.undo()
        others.append(UnixListener(path, socket.SOCK_STREAM, 0o600, 1))

    monkeypatch.setattr(socket.socket, "listen", listen_late)
    with pytest.raises(OSError, match="in use"):
        UnixListener(path, socket.SOCK_STREAM, 0o600, 1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    others[0].close()
    assert os.listdir(tmp_path) == []


def test_a_program_that_fails_prints_nothing_that_is_used() -> None:
    assert output_of("printf", "\\303\\251\\377") == "\u00e9\ufffd"
    assert output_of("sh", "-c", "echo no; exit 3") is None
    assert output_of("/no/such/program") is None
    assert output_of("sleep", "60", timeout_s=0.01) is None


def test_a_program_is_missing_as_a_shell_has_it(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    denied, missing = PermissionError(), FileNotFoundError()
    path = str(tmp_path)
    assert [is_missing("gone", error, path) for error in (denied, missing)] == [True, True]
    assert [is_missing("there", error, path) for error in (denied, missing)] == [False, False]
    assert not is_missing("gone", OSError(), path)
    assert not is_missing(f"{path}/closed/gone", denied, path), "its folder cannot be searched"
