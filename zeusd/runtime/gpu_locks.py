"""One engine at a time changes a GPU: zeusd, or one inside a training process.

An engine takes a GPU's lock before its first write and returns it when nothing on the GPU is
pending any more. All engines of root share one directory, whatever their state directories. The
locks are the process's own (POSIX): forked workers do not keep them, and the kernel frees them when
the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os

from zeus_ipc.errors import ErrorCode
from zeusd.core.model import Failure

log = logging.getLogger(__name__)

LOCK_DIR = "/run/zeusd/gpus"
LOCK_DIR_ENV = "ZEUSD_LOCK_DIR"
"""Replaces `LOCK_DIR`, for tests with GPUs of their own."""

_owners: dict[tuple[int, str], object] = {}
"""Engines by process and file: a process's own locks do not exclude each other."""


class GpuLocks:
    """The locks of one engine.

    Args:
        directory: The directory; None: the GPUs exist in this process only, and need no locks.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}

    def take(self, gpu: str) -> Failure | None:
        """Takes a GPU's lock, again if its file was removed. Returns why not; None: this engine
        has it."""
        if self._directory is None:
            return None
        path = os.path.join(self._directory, gpu.replace("/", "_"))
        if gpu in self._held:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), os.fstat(self._held[gpu])):
                    return None
            self.release(gpu)
        try:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            if (os.getpid(), path) in _owners:
                return _taken(gpu, str(os.getpid()))  # closing a file would free the other's lock
            fd = os.open(path, flags, 0o600)
        except OSError:
            return None  # where no lock can be made nobody has one
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 20, 0).decode(errors="replace")
            os.close(fd)
            return _taken(gpu, owner)
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._held[gpu] = fd
        _owners[os.getpid(), path] = self
        return None

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
        if fd is not None and self._directory is not None:
            os.close(fd)
            _owners.pop((os.getpid(), os.path.join(self._directory, gpu.replace("/", "_"))), None)

    def close(self) -> None:
        """Returns all locks."""
        for gpu in [*self._held]:
            self.release(gpu)


def lock_directory(simulated: bool) -> str | None:
    """Where the locks of this node's GPUs are; None: they need none."""
    return None if simulated else os.environ.get(LOCK_DIR_ENV, LOCK_DIR)


def _taken(gpu: str, owner: str) -> Failure:
    return Failure(
        ErrorCode.LEASE_HELD,
        f"{gpu} is changed by another zeusd or training process (pid {owner or 'unknown'}); wait "
        "until that has restored it, and let all processes of this node use one zeusd",
        gpu=gpu,
    )
