"""Exit codes of `zeusctl`. They are part of its interface: never changed, only added."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from zeus_ipc.errors import ErrorCode


class Exit(IntEnum):
    """Exit codes of the verbs."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    DENIED = 4
    HELD = 5
    UNKNOWN = 6
    OUT_OF_RANGE = 7
    PENDING = 8
    NOT_SUPPORTED = 9
    NOT_RUN = 125
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "success",
    Exit.FAILED: "another error; doctor: a check failed",
    Exit.USAGE: "the command line is wrong",
    Exit.UNAVAILABLE: "zeusd does not answer at the socket, or not in time",
    Exit.DENIED: "permission denied: this user may not do that, or may not use the socket",
    Exit.HELD: "another process holds the lease",
    Exit.UNKNOWN: "no such GPU, or no such job in the ledger",
    Exit.OUT_OF_RANGE: "the value is outside the range that the GPU or the site allows",
    Exit.PENDING: "a restore is still pending, or the node is quiesced",
    Exit.NOT_SUPPORTED: "the GPU or its driver does not support this",
    Exit.NOT_RUN: "measure, set: zeusctl itself failed, and did not run the command",
    Exit.NOT_EXECUTABLE: "measure, set: the command cannot be executed",
    Exit.NOT_FOUND: "measure, set: the command was not found",
    Exit.INTERRUPTED: "ended by Ctrl-C",
}

USAGE, UNKNOWN_JOB = "usage", "unknown_job"
"""Codes of errors that only zeusctl knows, besides `failed`."""

_BY_ERROR: dict[str, Exit] = {
    USAGE: Exit.USAGE,
    UNKNOWN_JOB: Exit.UNKNOWN,
    ErrorCode.UNAVAILABLE: Exit.UNAVAILABLE,
    ErrorCode.TIMEOUT: Exit.UNAVAILABLE,
    ErrorCode.SHUTTING_DOWN: Exit.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: Exit.UNAVAILABLE,
    ErrorCode.OVERLOADED: Exit.UNAVAILABLE,
    ErrorCode.ACCESS_REFUSED: Exit.DENIED,
    ErrorCode.PERMISSION_DENIED: Exit.DENIED,
    ErrorCode.LEASE_HELD: Exit.HELD,
    ErrorCode.LEASE_EXPIRED: Exit.HELD,
    ErrorCode.UNKNOWN_GPU: Exit.UNKNOWN,
    ErrorCode.OUT_OF_RANGE: Exit.OUT_OF_RANGE,
    ErrorCode.RESTORE_PENDING: Exit.PENDING,
    ErrorCode.QUIESCED: Exit.PENDING,
    ErrorCode.NOT_SUPPORTED: Exit.NOT_SUPPORTED,
}


def exit_for(code: str) -> Exit:
    """The exit code for an error's code: one of `zeus_ipc.errors.ErrorCode`, or zeusctl's own."""
    return _BY_ERROR.get(code, Exit.FAILED)


class CommandError(Exception):
    """Ends a verb: one sentence that says what failed and what to do, and the error's code, from
    which the exit code follows, unless it is given.
    """

    def __init__(self, message: str, code: str = "failed", exit_code: Exit | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_for(code) if exit_code is None else exit_code


def check_writable(path: Path) -> None:
    """Checks a file before the work whose result it is for.

    Raises:
        OSError: It cannot be written.
    """
    new = not path.exists()
    if new or path.is_file():  # not a pipe: its reader would see the end
        path.open("a").close()
    if new:
        path.unlink()


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Adds the file's name to errors of writing to it; None: standard output."""
    try:
        yield
    except OSError as error:
        if path is not None and error.filename is None:
            error.filename = str(path)
        raise
