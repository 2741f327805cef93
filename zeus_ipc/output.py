"""What to do when standard streams are closed, or cannot be written any more."""

from __future__ import annotations

import os
import sys


def discard_output() -> None:
    """Makes standard output take everything: Python writes what is left when it exits, and would
    fail again, with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed_streams() -> None:
    """Opens standard streams that were closed by who started this process, to read and write
    nothing: else the next file or connection gets their numbers, and is written to as output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
