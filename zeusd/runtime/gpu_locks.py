"""One engine at a time changes a GPU: zeusd, or one inside a training process.

An engine takes a GPU's lock before its first write and returns it when nothing on the GPU is
pending any more. All engines of root share one directory, whatever their state directories. A
lock's file has the GPU's initial values: an engine that starts meanwhile finds another's. The
locks are the process's own (POSIX): forked workers do not keep them, and the kernel frees them when
the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from typing import Any

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeus_ipc.parsing import Malformed, parse
from zeusd.core.model import Failure

log = logging.getLogger(__name__)

LOCK_DIR = "/run/zeusd/gpus"
LOCK_DIR_ENV = "ZEUSD_LOCK_DIR"
"""Replaces `LOCK_DIR`, for tests with GPUs of their own."""

_owners: dict[tuple[int, str], dict[str, Any]] = {}
"""What engines say, by process and file: a process's own locks do not exclude each other."""


class GpuLocks:
    """The locks of one engine."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}

    def take(self, gpu: str, initial: dict[Control, ControlValue] | None = None) -> Failure | None:
        """Takes a GPU's lock, again if its file was removed. Returns why not; None: this engine
        has it.
        """
        if self._directory is None:
            return None
        says = {"pid": os.getpid(), "initial": initial or {}}
        if gpu in self._held:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(self._path(gpu)), os.fstat(self._held[gpu])):
                    return None
            says = _owners.get((os.getpid(), self._path(gpu)), says)
            self.release(gpu)
        fd, owner = self._lock(gpu)
        if owner is not None:
            return _taken(gpu, owner.get("pid", "unknown"))
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(says).encode(), 0)
            self._held[gpu] = fd
            _owners[os.getpid(), self._path(gpu)] = says
        return None

    def initial(self, gpu: str) -> dict[Control, ControlValue]:
        """The initial values of a GPU that another engine changes now; empty: none does."""
        if self._directory is None or gpu in self._held:
            return {}
        fd, owner = self._lock(gpu)
        if fd >= 0:
            os.close(fd)
        said = (owner or {}).get("initial", {})
        return {Control(control): tuple(value) for control, value in said.items()}

    def _path(self, gpu: str) -> str:
        return os.path.join(str(self._directory), gpu.replace("/", "_"))

    def _lock(self, gpu: str) -> tuple[int, dict[str, Any] | None]:
        """Locks a GPU's file. Returns it, or -1, and what the engine that has it says, if one
        does."""
        path = self._path(gpu)
        if (says := _owners.get((os.getpid(), path))) is not None:
            return -1, says  # closing the file would free the other's lock
        try:
            os.makedirs(str(self._directory), mode=0o755, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
        except OSError:
            return -1, None  # where no lock can be made nobody has one
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            said: Any = None
            with contextlib.suppress(OSError, Malformed):
                # Most that an engine says in a lock's file.
                said = parse(os.pread(fd, 4096, 0))
            os.close(fd)
            return -1, said if isinstance(said, dict) else {}
        return fd, None

    def verify(self) -> None:
        """Takes locks again whose files were removed."""
        for gpu in [*self._held]:
            if (taken := self.take(gpu)) is not None:
                log.error(
                    "the lock of %s was removed from %s: %s",
                    gpu,
                    self._directory,
                    taken.message,
                    extra={"event": "lock_removed", "gpu": gpu},
                )

    def release(self, gpu: str) -> None:
        """Returns a GPU's lock, if this engine has it."""
        fd = self._held.pop(gpu, None)
        if fd is not None:
            os.close(fd)
            _owners.pop((os.getpid(), self._path(gpu)), None)

    def close(self) -> None:
        """Returns all locks."""
        for gpu in [*self._held]:
            self.release(gpu)


def lock_directory(simulated: bool) -> str | None:
    """Where the locks of this node's GPUs are; None: they need none."""
    return None if simulated else os.environ.get(LOCK_DIR_ENV, LOCK_DIR)


def _taken(gpu: str, owner: object) -> Failure:
    return Failure(
        ErrorCode.LEASE_HELD,
        f"{gpu} is changed by another zeusd or training process (pid {owner}); wait "
        "until that has restored it, and let all processes of this node use one zeusd",
        gpu=gpu,
    )
