"""Combines the reports of a node's ranks in one request: one rank collects them and distributes the
reply.

The ranks of a job on one machine connect to a socket in a folder that only their user can open. The
leader is the rank that holds the folder's lock. Once per interval it asks the others for reports,
sends all reports to the server, and forwards each rank's schedule. When it ends, the kernel drops
its lock and connections, and another rank takes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

ASK = b"?"
ANSWER_S = 0.2
"""How long the leader waits for the others' reports; late ones are asked again."""


class NodeReports:
    """One rank among those of its job on this machine.

    Raises:
        OSError: The folder cannot be used.
    """

    def __init__(self, job: str, folder: Path | None = None) -> None:
        if folder is None:
            folder = Path(tempfile.gettempdir()) / f"zeus-pipeline-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not a folder that only this user may use")
        name = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._address = str(folder / f"{name}.sock")
        self._lock_path = folder / f"{name}.lock"
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._listener: Listener | None = None
        self._others: list[Connection[Any, Any]] = []
        self._leader: Connection[Any, Any] | None = None
        self.leads = False

    def join(self) -> None:
        """Becomes the leader if there is none; otherwise connects to the leader.

        Raises:
            OSError: The leader does not listen.
        """
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._leader = Client(self._address, "AF_UNIX")
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address)
        self._listener = Listener(self._address, "AF_UNIX", backlog=128)
        self.leads = True

    # ---------------------------------------------------------------------------- the leader

    def gather(self) -> list[tuple[Connection[Any, Any], bytes]]:
        """The others' reports, each with its connection."""
        assert self._listener is not None
        # The standard library has no other way to check for pending connections.
        listener: Any = self._listener
        waiting = listener._listener._socket
        while wait([waiting], 0):
            self._others.append(self._listener.accept())
        for other in list(self._others):
            self.give(other, ASK)
        found: list[tuple[Connection[Any, Any], bytes]] = []
        silent = list(self._others)
        while silent:
            ready = wait(silent, ANSWER_S)
            if not ready:
                # A late reply would be mistaken for the next one.
                for other in silent:
                    self._drop(other)
                break
            for other in [one for one in silent if one in ready]:
                silent.remove(other)
                try:
                    found.append((other, other.recv_bytes()))
                except (EOFError, OSError):
                    self._drop(other)
        return found

    def give(self, other: Connection[Any, Any], message: bytes) -> None:
        """Sends to one of the others; drops one that has ended."""
        try:
            other.send_bytes(message)
        except OSError:
            self._drop(other)

    def _drop(self, other: Connection[Any, Any]) -> None:
        if other in self._others:
            self._others.remove(other)
        other.close()

    # ---------------------------------------------------------------------------- the others

    def asked(self, timeout_s: float) -> bool:
        """Whether the leader has asked for a report within a time.

        Raises:
            OSError: It is gone.
        """
        assert self._leader is not None
        if not self._leader.poll(timeout_s):
            return False
        return self._receive() == ASK

    def report(self, report: bytes, timeout_s: float) -> bytes:
        """Sends a report to the leader, and returns the server's reply.

        Raises:
            OSError: It has ended, or does not respond.
        """
        assert self._leader is not None
        self._leader.send_bytes(report)
        if not self._leader.poll(timeout_s):
            raise TimeoutError("the rank that reports for this node does not answer")
        return self._receive()

    def _receive(self) -> bytes:
        assert self._leader is not None
        try:
            return self._leader.recv_bytes()
        except EOFError:
            raise ConnectionResetError("the rank that reports for this node has ended") from None

    def close(self) -> None:
        """Leaves the group; another rank may become the leader."""
        for connection in (*self._others, self._leader, self._listener):
            if connection is not None:
                connection.close()
        self._others, self._leader, self._listener = [], None, None
        if self.leads:
            # If another rank has already opened it, two ranks lead, each for a part of the node.
            self._lock_path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.leads = False
