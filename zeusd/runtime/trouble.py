"""The present failure of a part of zeusd, for doctor, status and metrics."""

from __future__ import annotations

import errno
import sqlite3
import time
from pathlib import Path

from zeus_ipc.replies import NodeProblem
from zeusd.devices.port import DeviceError

KERNEL_LOG = "sudo dmesg | grep -iE 'nvrm|xid|amdgpu' | tail"
"""The command that says more about a GPU that does not work."""


class OpenFailure:
    """Remembers a failure, and since when, until the part works again. Any thread may ask.

    Args:
        part, source: See `NodeProblem`.
        since_ns: When it began, CLOCK_MONOTONIC; None: when it is noticed.

    Attributes:
        problem: The failure; None: the part works.
    """

    def __init__(self, part: str, source: str = "", since_ns: int | None = None) -> None:
        self._part = part
        self._source = source
        self._since_ns = since_ns
        self.problem: NodeProblem | None = None

    def failed(self, cause: str, code: str = "", command: str = KERNEL_LOG) -> bool:
        """Remembers a failure. Returns whether it is another one than before."""
        known = self.problem
        since_ns = self._since_ns if known is None else known.since_ns
        self.problem = NodeProblem(
            part=self._part,
            source=self._source,
            code=code,
            cause=cause,
            since_ns=time.monotonic_ns() if since_ns is None else since_ns,
            command=command,
        )
        return known is None or known.code != code

    def device_failed(self, error: DeviceError, cause: str = "") -> bool:
        """The same of a driver's error."""
        code = error.outcome.value if error.code is None else str(error.code)
        return self.failed(
            cause or f"{error.call}: {error.text}", code, error.command or KERNEL_LOG
        )

    def reading_failed(self, why: DeviceError | OSError | None, what: str) -> bool:
        """The same of a sensor; None: nothing fails, and it has nothing new."""
        if isinstance(why, DeviceError):
            return self.device_failed(why, f"{what}: {why.text}")
        return self.failed(f"{what}: {why or 'its sensors do not change'}")

    def disk_failed(
        self, error: OSError | sqlite3.Error, directory: str | Path, cause: str
    ) -> bool:
        """The same of a disk's error."""
        if isinstance(error, OSError):
            code = errno.errorcode.get(error.errno or 0, "")
        else:
            code = getattr(error, "sqlite_errorname", "")
        full = code in ("ENOSPC", "EDQUOT", "SQLITE_FULL")
        command = f"df -h {directory}" if full else f"findmnt -T {directory}"
        return self.failed(cause, code, command)

    def works(self) -> bool:
        """The part works. Returns whether it did not before."""
        failed, self.problem = self.problem is not None, None
        return failed
