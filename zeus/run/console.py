"""What goes to the console, and to a file as well."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO


class FileAndConsole:
    """Text that goes to two places; usable in the place of `sys.stdout`.

    Args:
        filepath: The file. What it has is kept, and more is added.
        stream: The console; None: standard output as it is now.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, filepath: str | Path, stream: TextIO | None = None) -> None:
        self._file = open(filepath, "a", encoding="utf-8")  # noqa: SIM115 - closed with this
        self._stream = sys.stdout if stream is None else stream

    def write(self, text: str) -> int:
        """Writes to both."""
        self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """What was written can be read by others."""
        self._file.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether the console is one."""
        return self._stream.isatty()

    def close(self) -> None:
        """The file is complete; the console stays."""
        self._file.close()
