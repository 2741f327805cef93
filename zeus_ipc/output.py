"""What to do when standard streams are closed, or cannot be written any more."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from zeus_ipc.overriding import override

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Unfailing(io.FileIO):
    @override
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def discard_output() -> None:
    """Makes standard output take everything: Python writes what is left when it exits, and would
    fail again, with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Opens standard streams that were closed by who started this process, to read and write
    nothing: else the next file or connection gets their numbers, and is written to as output. From
    then on, what cannot be written to standard error is lost, and stops nothing."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Unfailing(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            raw, sys.stderr.encoding, "backslashreplace", line_buffering=True
        )
